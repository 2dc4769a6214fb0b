"""Orders of a store become a table, a summary, and messages of another store."""

from typing import Any

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

active = SparkSession.getActiveSession()
assert active is not None, "run by spark-pipelines"
spark: SparkSession = active


@dp.table
def orders() -> Any:
    """Each message once, whenever the pipeline runs."""
    return (
        spark.readStream.format("mqstore")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("columns", "store_timestamp,tags,keys,body")
        .load(spark.conf.get("shop.store"))
    )


@dp.materialized_view
def orders_by_tag() -> Any:
    return spark.read.table("orders").groupBy("tags").count()


dp.create_sink("reports", "mqstore", {"path": spark.conf.get("shop.reports") or "", "topic": "paid-orders"})


@dp.append_flow(target="reports")
def paid_orders() -> Any:
    return spark.readStream.table("orders").where("tags = 'paid'").select("body", "keys")
