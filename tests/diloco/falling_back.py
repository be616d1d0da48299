"""A run that falls back sooner: python -m tests.diloco.falling_back SECONDS FLAGS_OF_JAXTRAIN_MAIN."""

import runpy
import sys

from jaxtrain.diloco.network import fallback_meeting

if __name__ == "__main__":
    fallback_meeting.FALL_BACK_S = fallback_meeting.AGAIN_S = float(sys.argv.pop(1))
    runpy.run_module("jaxtrain.main", run_name="__main__", alter_sys=True)
