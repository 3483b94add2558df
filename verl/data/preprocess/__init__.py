"""Public data sets in upstream's columns, as parquet files: `python examples/data_preprocess/NAME.py`."""
