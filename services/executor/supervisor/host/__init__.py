"""The executor as a host: models and their files, memory, the interface of jobs, what it is told and what it says."""
