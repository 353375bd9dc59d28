import csv
import json
import sys

with open(sys.argv[1]) as file:
    goods = list(csv.DictReader(file))
value = sum(int(good["number"]) * int(good["price"]) for good in goods)
most = max(goods, key=lambda good: int(good["number"]))["good"]
print(json.dumps({"value": value, "most": most}))
