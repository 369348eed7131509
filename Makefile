# Two commands for a newcomer: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
TOOLS := .venv-tools
BIN := $(VENV)/bin
# One torch thread per process; parallelism is by processes.
export OMP_NUM_THREADS ?= 1
FUZZ ?= 4000
SEED ?= 0
BASE ?= 5a24957

.PHONY: demo federation-demo test test-all same mutants fuzz check format docs wheel lock sbom hadolint release-check pages pictures figures draw clean help

help:
	@echo "make demo      10 clients with one digit each: FedCC against FedAvg, FedMD and the two bounds"
	@echo "make federation-demo  a server and four clients on Flower against the simulator, bit for bit"
	@echo "make test      the tests (minutes)"
	@echo "make test-all  those that need a clean environment, servers or long runs too"
	@echo "make same      another commit (BASE=5a24957) against this one, bit for bit (ten minutes; ONLY='*/fedcc*' or demo for less)"
	@echo "make mutants   small changes of the methods, each of which must make a test fail (ten minutes; SHARE=0.04 for fewer)"
	@echo "make fuzz      damaged and hostile inputs for everything that is read (FUZZ=1000000 for more, TARGET=, SEED=, INDEX=)"
	@echo "make check     format, lint, types, import rules"
	@echo "make wheel     build the wheel into dist/"
	@echo "make lock      deploy/requirements.lock: all packages of the images, with hashes (minutes; Python 3.11)"
	@echo "make sbom      dist/sbom.json: what the images hold, as CycloneDX"
	@echo "make hadolint  lint the Dockerfile"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make pages     write anew what is generated in README.md and docs/: results, both tables of methods, the notebook (minutes)"
	@echo "make pictures  draw the picture of the idea anew"
	@echo "make draw      train the federation of docs/draw.md anew"
	@echo "make figures   the paper's figures on CIFAR-10 (a GPU; FIGURES='--with fraction=0.2 ...' for less)"
	@echo "make release-check  build the wheel and the source distribution, and check both"

# Three sets of packages in one environment: the package, with Flower, and all that tests and checks need.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/.package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.flower: $(VENV)/.package
	$(INSTALL) -e '.[flower]'
	@touch $@

$(VENV)/.ready: $(VENV)/.package
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.flower

demo: $(VENV)/.package
	$(BIN)/fedcc demo

federation-demo: $(VENV)/.flower
	rm -rf runs/federation-demo
	$(BIN)/fedcc federation demo

test: $(VENV)/.ready
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# three processes on two cores: many of these tests wait for servers
test-all: $(VENV)/.ready
	$(BIN)/pytest -n 3 --dist worksteal

same: $(VENV)/.ready
	$(BIN)/python tests/same.py $(BASE) $(foreach pattern,$(ONLY),--only '$(pattern)')

mutants: $(VENV)/.ready
	$(BIN)/python tests/mutants.py --jobs 2 $(if $(SHARE),--share $(SHARE))

fuzz: $(VENV)/.ready
	PYTHONPATH=tests $(BIN)/python -m fuzz --inputs $(FUZZ) --seed $(SEED) $(if $(TARGET),--target $(TARGET)) \
		$(if $(INDEX),--index $(INDEX))

check: $(VENV)/.ready
	$(BIN)/ruff format --check src tests examples docs/make
	$(BIN)/ruff check src tests examples docs/make
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.ready
	$(BIN)/ruff format src tests examples docs/make
	$(BIN)/ruff check --fix src tests examples docs/make

wheel: $(VENV)/.ready
	$(BIN)/python -m build --wheel --outdir dist

$(TOOLS)/.ready: deploy/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check -r deploy/tools.txt
	@touch $@

# without options that name an index: which one is used is the machine's business, not the file's
lock: $(TOOLS)/.ready
	$(TOOLS)/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header --no-emit-index-url \
		--no-emit-find-links --no-emit-trusted-host --extra flower -c constraints.txt -o deploy/requirements.lock pyproject.toml

sbom: $(TOOLS)/.ready
	mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible -o dist/sbom.json \
		deploy/requirements.lock

hadolint: $(TOOLS)/.ready
	$(TOOLS)/bin/hadolint deploy/Dockerfile

release-check: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

pages: $(VENV)/.ready
	$(BIN)/fedcc report results --readme README.md --markdown docs/results.md
	$(BIN)/python tests/integration/test_docs.py
	$(BIN)/python docs/make/which_method.py
	$(BIN)/python docs/make/execute.py docs/notebook.ipynb

pictures: $(VENV)/.package
	$(BIN)/fedcc run fedcc --data digits --rounds 1 --epochs 5 --out runs/idea --overwrite
	$(BIN)/fedcc analyse runs/idea
	$(BIN)/fedcc report runs/idea --out runs/idea/report
	cp runs/idea/report/figures/*_fedcc_example.png docs/idea.png

draw: $(VENV)/.package
	$(BIN)/python docs/make/draw_model.py

# The paper's figures on CIFAR-10; FIGURES='--with fraction=0.2 ...' for less than the paper's budget.
figures: $(VENV)/.package
	$(BIN)/fedcc sweep experiments/figures.toml --out runs/figures $(FIGURES)
	for run in runs/figures/*/*/seed0; do $(BIN)/fedcc analyse $$run || exit 1; done
	$(BIN)/fedcc report runs/figures --out runs/figures/report

clean:
	rm -rf $(VENV) $(TOOLS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
