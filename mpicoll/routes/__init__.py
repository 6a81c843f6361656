"""How the bytes move. Importing this package loads no MPI; most of its modules do."""
