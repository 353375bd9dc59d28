#!/bin/bash
python3 "$(dirname "$0")/report.py" "$SOURCE" > "$REPORT"
