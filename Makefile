# The things one does here. Each target makes the virtual environment it needs; after the first time no network is used.
#
#   make demo    store, kill, recover, read and inspect a real workload (under a minute)
#   make test    everything that must hold: formatting, lints, types, import arrows, tests, doctests
#   make lint    the same without the tests
#   make cover   the tests, and which lines they miss
#   make bench   mqstore beside its peers, each answer beside its goal (BENCH="-k put" chooses, BENCH=--quick tries)
#   make bench-compare  the same beside the last saved run, or OLD=0001; fails if a question is slower by WORSE=20%
#   make spark   the tests that need pyspark and Java, in an environment of their own (3 minutes once that is there)
#                (PYSPARK=4.1.4 takes that version, in an environment of its own; 4.1 or later)
#   make spark-alone  those that start a Spark of their own: clusters, the tutorials as typed in (4 minutes)
#   make delta   Delta tables imported, and written by streams, in an environment of their own (needs Maven)
#   make spark-bench  Spark's reads, writes and jobs beside what they replace, each ratio beside its goal (half an hour)
#   make interop  both engines on one store, ours and Apache RocketMQ's (needs a JDK, Maven; ROCKETMQ=5.4.0 takes another)
#   make conformance  RocketMQ's Java and Go clients and mqadmin against `mqstore serve` (needs a JDK, Maven, Go; CLIENTS=5.4.0 takes others)
#   make cluster  our client against RocketMQ's name server and two brokers (needs a JDK, Maven; ROCKETMQ=5.4.0 takes another)
#   make test-connect  all tests of queues, producers and consumers behind a server (5 minutes)
#   make crash   more crash images than `make test` tries, N=100000 of them, and a crash or error at every change
#   make serve-faults  a server and its clients are killed N=20 times under load, and 5000 random frames for each
#   make items   a queue is killed N=500 times among all its verbs, in each of three kinds
#   make descriptors  stores in processes with few file descriptors: N=2000 cases (a few a second)
#   make retention  every command and call that reads beside a writer that drops segments, N=20 rounds
#   make interrupts  Ctrl-C at N=4000 points of every call, one after the other (all: half an hour)
#   make stress  producers and consumers of all kinds at once, for N=60 seconds
#   make shared  processes that share a directory while its server is killed, and ends idle, N=30 times each
#   make hostile  commands on stores whose files and folders are links, pipes, devices: N=30000 of such cases (all)
#   make salvage  every kind of damage on every kind of store, and N=200 random stores with random damage
#   make sanitize  tests of the compiled parts under the address and undefined-behaviour sanitizers (needs gcc)
#   make arm64   tests of the compiled parts on Linux arm64, emulated (needs Debian, its cross-compiler and qemu; ARM64="tests" chooses)
#   make wheel   a wheel, checked by auditwheel, installed where there is no compiler, and used there
#   make docs    docs/commands.md, the tables of docs/spark-options.md and store/native/table.h from the code; fails if one was stale (and makes it fresh)
#   make man     man pages of all commands and topics of help, in var/man (`man -l var/man/mqstore.1`)
#   make clean   remove the environment, caches and var/
#
# PYTHON=/path/to/python3.12 chooses the interpreter; else the first of these that runs and is 3.11 or later is taken.

CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for candidate in $(CANDIDATES); do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$candidate; break; }; \
	done)
VENV  ?= .venv
BIN   := $(VENV)/bin
BENCH ?=
OLD   ?=
WORSE ?= 20%
N     ?= 5000
ROCKETMQ ?= 5.3.3
PYSPARK ?=
COVER ?=
ARM64 ?=
WHEEL := var/wheel
SPARK_VENV := .venv-spark$(PYSPARK:%=-%)
# Two more than there are processors: tests wait for disks, other processes and clocks.
JOBS  ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)

# Compiled modules are kept, in the environment: every worker and every process of a test would make them again.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

.DEFAULT_GOAL := help
.PHONY: help demo test test-connect cover lint bench bench-compare spark spark-alone spark-bench delta interop conformance cluster crash descriptors retention shared hostile salvage stress interrupts sanitize arm64 wheel docs man clean serve-faults items

help:
	@sed -n 's/^#   make/  make/p' Makefile

demo: $(VENV)/stamp-core
	$(BIN)/python -m examples.demo

# Tests of rules that have a compiled twin. Others take turns, as tests/damage does for whole recoveries.
COMPILED := $(patsubst %,tests/layout/test_%.py,dispatch_few encode indexfile messageid pairs properties record run scan) \
	$(patsubst %,tests/log/test_%.py,copy_many dispatch golden put read scanner_live small_batches splice) \
	$(patsubst %,tests/broker/test_%.py,pop pop_fifo pop_restart) $(patsubst %,tests/client/test_%.py,priority queue)

# Tests sync often, and take half the time on a file system in memory, if there is one with room for them.
SCRATCH := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 2097152 { print $$6 }')

# Everything with the compiled parts, as everybody has it, then those tests by Python alone.
test: export TMPDIR := $(or $(TMPDIR),$(SCRATCH))
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(COVER:%=--cov --cov-report=)
	MQSTORE_NATIVE=0 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(COVER:%=--cov --cov-append --cov-report=term) $(COMPILED)

# Looking at each line makes the tests take half as long again.
cover:
	@$(MAKE) --no-print-directory test COVER=1

lint: $(VENV)/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.tics

# The jars of RocketMQ's store are those of `make interop`. Without them that side is left out, with a word.
bench: $(VENV)/stamp-bench
	-@test -n "$$MQSTORE_ROCKETMQ" || ! command -v mvn >/dev/null || $(MAKE) --no-print-directory var/rocketmq-$(ROCKETMQ)/fetched
	$(BIN)/python -m pytest $(or $(filter bench/%,$(BENCH)),bench --ignore=bench/test_spark.py) $(BENCHMARK) $(filter-out bench/%,$(BENCH))

# A run saves itself, unless it is only tried (--quick, --share).
BENCHMARK := --benchmark-autosave --benchmark-sort=fullname --benchmark-columns=min,median,max,iqr,rounds

bench-compare: BENCHMARK += --benchmark-group-by=fullname --benchmark-compare$(OLD:%==%) --benchmark-compare-fail=min:$(WORSE)
bench-compare: bench

# Not with the others: pyspark alone is half a gigabyte.
spark:
	@$(MAKE) --no-print-directory VENV=$(SPARK_VENV) $(SPARK_VENV)/stamp-spark
	MQSTORE_REQUIRE_SPARK=1 $(SPARK_VENV)/bin/python -m pytest --durations=5 -m "not spark_alone" tests/spark tests/jobs/test_spark.py

spark-alone:
	@$(MAKE) --no-print-directory VENV=$(SPARK_VENV) $(SPARK_VENV)/stamp-spark
	MQSTORE_REQUIRE_SPARK=1 $(SPARK_VENV)/bin/python -m pytest --durations=5 -m spark_alone tests/spark

# Delta knows no newer Spark than this one.
delta: var/delta/fetched
	@$(MAKE) --no-print-directory VENV=.venv-delta PYSPARK=4.2.0 .venv-delta/stamp-spark
	MQSTORE_REQUIRE_SPARK=1 MQSTORE_DELTA=var/delta .venv-delta/bin/python -m pytest --durations=5 tests/spark/test_delta.py

var/delta/fetched: tests/spark/delta.xml
	mvn --batch-mode --quiet --file $< dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(@D) \
		-DexcludeGroupIds=org.apache.spark,org.apache.hadoop,org.scala-lang,org.apache.parquet,org.apache.logging.log4j,org.slf4j,com.fasterxml.jackson.core,com.fasterxml.jackson.datatype,commons-logging,com.github.luben,org.xerial.snappy
	@touch $@

spark-bench:
	@$(MAKE) --no-print-directory VENV=$(SPARK_VENV) $(SPARK_VENV)/stamp-spark
	$(SPARK_VENV)/bin/python -m pytest bench/test_spark.py $(BENCHMARK) $(BENCH)

interop: $(VENV)/stamp-dev var/rocketmq-$(ROCKETMQ)/fetched
	MQSTORE_ROCKETMQ=var/rocketmq-$(ROCKETMQ) $(BIN)/python -m pytest -n 2 --durations=5 tests/interop

var/rocketmq-%/fetched: tests/interop/pom.xml
	mvn --batch-mode --quiet --file $< dependency:copy-dependencies -Drocketmq.version=$* -DoutputDirectory=$(CURDIR)/$(@D)
	@touch $@

CLIENTS ?= 5.3.3 4.9.8 3.2.6
GO_CLIENT := $(if $(shell command -v go),var/go-client)

# SCENARIOS="pop timer" takes only these of the programs in tests/serve/java and tests/serve/go.
conformance: $(VENV)/stamp-dev $(CLIENTS:%=var/rocketmq-client-%/fetched) var/rocketmq-tools-5.3.3/fetched $(GO_CLIENT)
	MQSTORE_ROCKETMQ_CLIENTS=$(subst $(eval) ,:,$(CLIENTS:%=var/rocketmq-client-%)) MQSTORE_ROCKETMQ_TOOLS=var/rocketmq-tools-5.3.3 MQSTORE_GO_CLIENT=$(GO_CLIENT) $(BIN)/python -m pytest tests/serve/test_java.py tests/serve/test_mqadmin.py tests/serve/test_mixed.py

var/go-client: tests/serve/go/main.go tests/serve/go/go.mod
	go -C tests/serve/go build -mod=mod -o $(CURDIR)/$@ .

COPY_JARS = mvn --batch-mode --quiet --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(@D) -Drocketmq.version=$*
var/rocketmq-client-%/fetched: tests/serve/java/pom.xml
	$(COPY_JARS) $(if $(filter 3.%,$*),-Drocketmq.group=com.alibaba.rocketmq)
	@touch $@

var/rocketmq-tools-%/fetched: tests/serve/java/pom.xml
	$(COPY_JARS) -Drocketmq.artifact=rocketmq-tools
	@touch $@

cluster: $(VENV)/stamp-dev var/rocketmq-cluster-$(ROCKETMQ)/fetched
	MQSTORE_ROCKETMQ_CLUSTER=var/rocketmq-cluster-$(ROCKETMQ) $(BIN)/python -m pytest tests/cluster

var/rocketmq-cluster-%/fetched: tests/cluster/java/pom.xml
	$(COPY_JARS)
	@touch $@

test-connect: $(VENV)/stamp-dev
	MQSTORE_TEST_CONNECT=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --timeout 600 -k connect tests/client tests/conformance

# Files of tests/log that try a kill at each change of a run, as those of other folders below do.
KILLED := inbox recovery snapshot splice watermark

crash: $(VENV)/stamp-dev
	MQSTORE_CRASH_IMAGES=$(N) $(BIN)/python -m pytest -q tests/crash $(KILLED:%=tests/log/test_%.py) tests/broker/test_cut.py tests/broker/test_popjava.py tests/jobs/test_publish.py

serve-faults: N = 20
serve-faults: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) MQSTORE_CAMPAIGN_FRAMES=$$((5000 * $(N))) $(BIN)/python -m pytest -q tests/serve/test_faults.py tests/remote/test_faults.py

items: N = 500
items: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n 2 --timeout 3600 tests/crash/test_items_kill.py

descriptors: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n $(JOBS) tests/campaigns/test_descriptors.py

retention: N = 20
retention: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n $(JOBS) tests/campaigns/test_beside_retention.py

interrupts: N = 4000
interrupts: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n $(JOBS) --timeout 3600 tests/campaigns/test_interrupts.py

stress: N = 60
stress: $(VENV)/stamp-dev
	MQSTORE_STRESS_SECONDS=$(N) $(BIN)/python -m pytest -q tests/stress

shared: N = 30
shared: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q --timeout 3600 --durations=2 tests/remote/test_sharing.py -k "kills or idle"

hostile: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n $(JOBS) --timeout 3600 tests/campaigns/test_hostile.py

salvage: N = 200
salvage: $(VENV)/stamp-dev
	MQSTORE_CAMPAIGN_ROUNDS=$(N) $(BIN)/python -m pytest -q -n $(JOBS) tests/damage

sanitize: $(VENV)/stamp-dev
	$(BIN)/python tests/sanitized.py

arm64: $(VENV)/stamp-dev
	$(BIN)/python -m tests.arm64 $(ARM64)

# What auditwheel makes names every Linux that it runs on; elsewhere the wheel stays as it was built.
wheel: $(VENV)/stamp-wheel
	rm -rf $(WHEEL)
	MQSTORE_NATIVE=require $(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(WHEEL) .
	if [ -x $(BIN)/auditwheel ]; then $(BIN)/auditwheel show $(WHEEL)/*.whl && \
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir $(WHEEL) $(WHEEL)/*.whl && rm $(WHEEL)/*-linux_*.whl; fi
	$(BIN)/python -m venv --without-pip $(WHEEL)/venv
	PATH=/nowhere $(PIP) --python $(WHEEL)/venv/bin/python install $(WHEEL)/*.whl
	env -i PATH=/nowhere $(CURDIR)/$(WHEEL)/venv/bin/python -I tests/installed.py

docs: $(VENV)/stamp-dev
	@stale=0; for page in docs/commands.md docs/spark-options.md store/native/table.h; do \
	$(BIN)/python -m scripts.docs $$page > $(VENV)/page.md || exit 1; \
	if cmp -s $(VENV)/page.md $$page; then echo "$$page is fresh"; \
	else cp $(VENV)/page.md $$page; echo "$$page was stale; it has been written again"; stale=1; fi; done; exit $$stale

man: $(VENV)/stamp-dev
	$(BIN)/python -m scripts.docs --man var/man

clean:
	rm -rf $(VENV) .venv-spark .venv-spark-* .venv-delta .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks build dist var store/mqstore/_native.*

# --- environments ------------------------------------------------------------------------------------------------------
# One environment, filled as far as a target needs. A stamp holds the files that it was made for, so that a checkout
# that only touches them installs nothing. What builds goes in first and builds are not isolated: reinstalling when these
# files changed but every requirement is there already works without a network. pyspark comes as sources, and
# setuptools builds a wheel by itself from 70.1 on.

MADE_FOR := pyproject.toml hatch_build.py $(sort $(wildcard store/native/*.[ch]))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

$(VENV)/stamp-core:  EXTRA :=
$(VENV)/stamp-dev:   EXTRA := [dev]
$(VENV)/stamp-bench: EXTRA := [bench]
$(VENV)/stamp-wheel: EXTRA := [wheel]
$(VENV)/stamp-spark: EXTRA := [dev,spark,connect]
$(VENV)/stamp-spark: PINNED := $(PYSPARK:%=pyspark==%)

$(VENV)/stamp-core $(VENV)/stamp-dev $(VENV)/stamp-bench $(VENV)/stamp-wheel $(VENV)/stamp-spark: $(MADE_FOR) $(BIN)/python
	@if cat $(MADE_FOR) 2>/dev/null | cmp -s - $@; then touch $@; else \
	echo "installing mqstore$(EXTRA) $(PINNED) into $(VENV)"; \
	$(PIP) install 'hatchling>=1.26' 'setuptools>=70.1' && $(PIP) install --no-build-isolation --editable '.$(EXTRA)' $(PINNED) && \
	cat $(MADE_FOR) >$@; fi

# Some systems ship venv without ensurepip: then the interpreter's own pip furnishes the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mqstore needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) && \
	$(PYTHON) -m pip --quiet --python $(VENV)/bin/python install pip; }
