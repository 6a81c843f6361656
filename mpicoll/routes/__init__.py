"""The routes that move the data. Importing the package does not load MPI; most modules do."""
