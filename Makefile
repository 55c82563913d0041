# make demo: models that come with the package speak and write English here; nothing to download but Python packages.
# make test: all tests but the slow ones (ARGS="-m slow" runs those). Both set up a virtual environment of their own first; PYTHON=python3.12 picks another Python.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# macOS needs plain mlx. Linux needs one of MLX's back ends: EXTRA=cpu, cuda12 or cuda13, never two in one environment.
ifeq ($(shell uname -s),Linux)
EXTRA ?= cpu
EXTRAS := $(EXTRA),test
# MLX's Linux wheel brings a slow BLAS; Debian's OpenBLAS (apt install libopenblas0-pthread) is 10 to 40 times faster.
OPENBLAS := $(wildcard /usr/lib/*/libopenblas.so.0)
ifneq ($(OPENBLAS),)
PRELOAD := LD_PRELOAD=$(firstword $(OPENBLAS))
endif
else
EXTRAS := test
endif

TEXT := Good morning. Your train leaves at nine from platform four.
PROMPT := It was a dark and stormy night, and

.PHONY: demo test clean

demo: $(VENV)/.installed
	@echo '$$ mlx_cosyh3 say "$(TEXT)" --seed 1 -o demo.wav --overwrite --stats'
	@$(PRELOAD) MLX_DISABLE_COMPILE=1 $(BIN)/mlx_cosyh3 say '$(TEXT)' --seed 1 -o demo.wav --overwrite --stats
	@echo
	@echo '$$ mlx_cosyh3 generate "$(PROMPT)" --seed 1 --max-tokens 120'
	@printf '%s' '$(PROMPT)'
	@$(PRELOAD) MLX_DISABLE_COMPILE=1 $(BIN)/mlx_cosyh3 generate '$(PROMPT)' --seed 1 --max-tokens 120
	@echo
	@echo 'Talk to it:  $(BIN)/mlx_cosyh3 repl'
	@echo 'Let it talk: $(BIN)/mlx_cosyh3 repl --model cosyvoice3-tiny'

test: $(VENV)/.installed
	$(PRELOAD) MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest -q -m "not slow" $(ARGS)

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache
