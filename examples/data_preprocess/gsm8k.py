"""GSM8K to parquet; see `--help` and docs/examples/gsm8k_example.md."""

from verl.data.preprocess.gsm8k import main

if __name__ == "__main__":
    raise SystemExit(main())
