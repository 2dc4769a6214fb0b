"""The shared Spark session, for the file that runs each job in it."""

from tests.spark.conftest import spark, spark_environment

__all__ = ["spark", "spark_environment"]
