"""What a server does with new weights: judges them on all ranks before the first write, writes them, and says so."""
