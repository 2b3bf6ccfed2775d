"""Many ranks, one result: what ranks agree on, how they talk, how they are started and end as one job."""
