import json

try:
    with open("report.json") as file:
        report = json.load(file)
except (OSError, ValueError):
    report = {}
value, most = float(report.get("value") == 284), float(report.get("most") == "cup")
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": (value + most) / 2, "value": value, "most": most}, file)
