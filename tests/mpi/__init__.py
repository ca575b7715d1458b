"""trashd as an MPI job, by each MPI that is installed: MPICH in CI, Open MPI by `make mpi` as well."""
