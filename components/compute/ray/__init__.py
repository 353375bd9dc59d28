"""Place `ray`: a Ray cluster, through Prefect's task runner."""
