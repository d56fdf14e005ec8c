"""What the checks share: a client, and one line per check so that a run reads as a list."""

import argparse
import os
import sys
import time

import openai


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default=os.environ.get("KEEPSAKE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--api-key", default=os.environ.get("KEEPSAKE_API_KEY", "none"))
    return parser.parse_args()


def client(args):
    # Retries would hide a server that fails now and then.
    return openai.OpenAI(base_url=args.url + "/v1", api_key=args.api_key, max_retries=0, timeout=120)


def refused(kind, status, param, call):
    """The call must fail as `kind` with this status and parameter; returns the exception."""
    try:
        call()
    except kind as error:
        assert error.status_code == status, (error.status_code, status)
        assert error.param == param, (error.param, param)
        assert error.message, error
        return error
    except Exception as error:
        raise AssertionError(f"expected {kind.__name__}, got {error!r}") from error
    raise AssertionError(f"expected {kind.__name__}, got an answer")


def run(checks):
    """Runs every check, prints one line each and the total; the process fails if one did."""
    failed = 0
    for check in checks:
        started = time.monotonic()
        try:
            check()
            print(f"ok    {check.__name__} ({time.monotonic() - started:.2f} s)")
        except Exception as error:
            failed += 1
            print(f"FAIL  {check.__name__}: {type(error).__name__}: {error}")
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)
