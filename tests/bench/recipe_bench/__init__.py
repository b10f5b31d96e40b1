"""The parts of ``bench_recipes.py``, in the order in which they are used."""
