"""Building blocks of the network, sharded over a ParallelGroup where their names say so."""
