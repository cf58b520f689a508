"""What a run on many accelerators will cost, from its sizes alone: nothing is allocated and no process is started."""
