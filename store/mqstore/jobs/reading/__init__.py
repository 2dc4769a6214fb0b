"""Reading by jobs: stores, plans, progress of streams, tasks."""
