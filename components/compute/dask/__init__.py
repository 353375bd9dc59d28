"""Place `dask`: a Dask cluster, through Prefect's task runner."""
