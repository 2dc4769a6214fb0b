"""Options of jobs and of the data source for Spark, and the choice of messages and stores."""
