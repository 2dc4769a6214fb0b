"""Orders of a store: those that are paid become messages of another store, all of them files."""

from typing import Any

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

active = SparkSession.getActiveSession()
assert active is not None, "run by spark-pipelines"
spark: SparkSession = active


@dp.temporary_view
def orders() -> Any:
    return (
        spark.readStream.format("mqstore")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("columns", "store_timestamp,tags,keys,body")
        .load(spark.conf.get("spark.shop.store"))
    )


dp.create_sink("reports", "mqstore", {"path": spark.conf.get("spark.shop.reports") or "", "topic": "paid-orders"})
dp.create_sink("archive", "parquet", {"path": spark.conf.get("spark.shop.archive") or ""})


@dp.append_flow(target="reports")
def paid_orders() -> Any:
    return spark.readStream.table("orders").where("tags = 'paid'").select("body", "keys")


@dp.append_flow(target="archive")
def all_orders() -> Any:
    return spark.readStream.table("orders")
