"""Records as columns, by numpy and pyarrow, without Spark.

reading   rows (ranges of a queue -> checked records) -> columns (-> Arrow, by `arrow`); tally (counts of them)
writing   inputs (columns and topics of rows) -> encode (rows -> records)
"""
