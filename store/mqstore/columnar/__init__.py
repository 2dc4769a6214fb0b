"""Records as columns, by numpy and pyarrow: knows no Spark, and neither options nor which stores are meant.

reading   rows (ranges of a queue -> checked records) -> columns (-> Arrow, made by `arrow`); tally (figures of them)
writing   inputs (which columns rows may have) -> encode (rows -> records), by the `rules` of the target's topics
"""
