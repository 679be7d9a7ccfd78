# The interpreter that the virtual environment is made from
PYTHON ?= python3

# `$(with_py) <command using $$py>`: the environment's python, made first if need be; the package comes from this checkout
with_py = @py=$$(PYTHON="$(PYTHON)" bash scripts/venv.sh) && export PYTHONPATH="$(CURDIR)" &&

.PHONY: demo test quick venv export readme clean-nbs

demo:       ## train on real data on 8 emulated cores and on one, and compare
	$(with_py) "$$py" examples/demo.py

test:       ## everything: the tests and every notebook
	$(with_py) "$$py" -m pytest tests -q

quick:      ## the tests that take seconds
	$(with_py) "$$py" -m pytest tests -q -m quick

venv:       ## print the python that the targets above use
	$(with_py) echo "$$py"

export:     ## write the package from the notebooks
	$(with_py) "$$(dirname "$$py")/nbdev-export"

readme:     ## write README.md from nbs/index.ipynb
	$(with_py) "$$py" scripts/readme.py

clean-nbs:  ## strip from the notebooks what changes at every run
	$(with_py) "$$(dirname "$$py")/nbdev-clean"
