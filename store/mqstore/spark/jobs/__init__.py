"""Ready-made pipelines over stores, one module each: a function of the library, and a command `mqstore spark NAME`.

    shape      what all have in common: which messages, a plan, results, how tasks are run
    export     messages to Parquet, and later only what came since
    lag        how far groups are behind, and whether they catch up
    traffic    how many messages, how large, when, under which keys
    trace      one key or message id on its way through topics, retries, delays and dead letters
    dlq        what groups gave up, and why
    sql        stores as views of SQL
    verify     whether everything in stores is as it should be
    ranges     a log read in byte ranges, and put together again: for verify
    resend     dead letters to where they came from

A job has three parts, and Spark sees only the second: the driver plans, from consume queues (`plan`); tasks, which are
plain values, are worked on by a function of a module, which opens the stores it needs; the driver joins what they give
back, which is small. So rows do not cross from Python to Java and back. With `spark=None` the same tasks are run one
after the other in this process, without pyspark and Java.

Nothing is imported here: a worker that runs a task of one job loads that job.
"""
