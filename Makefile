# NearMem: every target makes its own virtual environment first; nothing else has to be typed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
EXTRAS ?= dev,fpga
STAMP  := $(VENV)/.installed-$(subst $(empty) ,,$(EXTRAS))
export OPENBLAS_NUM_THREADS ?= 1

UNIT   ?=
CONFIG ?=
SIM    ?=
TARGET ?=
BOARD  ?= ulx3s_85f

.PHONY: setup sim test synth formal mutate bench verilog bitstream report lint exhaustive clean tools

setup: $(STAMP)

# What Verilator and this Makefile need from the system, told in one line before anything is built.
tools:
	@command -v $(PYTHON) >/dev/null || { echo "python3 is not installed: install Python 3.11 or newer (on Debian: apt install python3 python3-venv)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed" >&2; exit 2; }
	@command -v $${CXX:-g++} >/dev/null || { echo "g++ is not installed: install a C++ compiler (on Debian: apt install g++)" >&2; exit 2; }

$(STAMP): pyproject.toml | tools
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

sim: setup
	$(PY) -m tb sim $(UNIT) $(if $(CONFIG),--config $(CONFIG)) $(if $(SIM),--sim $(SIM))

test: setup
	$(PY) -m pytest -q -n 2 --dist worksteal $(ARGS)

synth: setup
	$(PY) -m synth $(if $(UNIT)$(TARGET)$(CONFIG),area $(or $(UNIT),--all) $(if $(TARGET),--target $(TARGET)) $(if $(CONFIG),--config $(CONFIG)),summary)

formal: setup
	$(PY) -m tb.formal

mutate: setup
	$(PY) -m tb mutate $(UNIT)

# Runs that are too long for the suite: every configuration of the catalog through cocotb, a million random inputs.
exhaustive: setup
	$(PY) -m tb sim --config all --beats 200000 $(UNIT)
	NEARMEM_EXHAUSTIVE=1 $(PY) -m pytest -q -n 2 $(ARGS)

bench: setup
	$(PY) -m tb speed
	$(PY) -m golden speed

verilog: setup
	@mkdir -p build/verilog
	$(PY) -m hw verilog $(if $(UNIT),$(UNIT)) --config $(or $(CONFIG),paper) -o build/verilog

bitstream: setup
	$(PY) -m synth.bitstream --board $(BOARD) --unit $(or $(UNIT),softmax) $(if $(CONFIG),--config $(CONFIG))

report: setup
	$(PY) -m hw list
	$(PY) -m synth summary

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf build
