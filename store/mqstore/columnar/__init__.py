"""Records as columns, by numpy and pyarrow, without Spark.

reading   rows (ranges of a queue -> checked records) -> columns (-> Arrow, made by `arrow`); tally (figures of them)
writing   inputs (which columns rows may have) -> encode (rows -> records), by the `rules` of the target's topics
"""
