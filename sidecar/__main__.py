from sidecar.cli import run_alone

run_alone()
