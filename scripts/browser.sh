#!/usr/bin/env bash
# Installs Debian's chromium for the tests of the trackers' pages, if it is missing and the user is root.
# Called by test.sh. Takes a minute the first time and never fails: without chromium, these tests are skipped.
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
echo "installing chromium and chromium-driver for the tests of the trackers' pages" >&2
export DEBIAN_FRONTEND=noninteractive
options=(-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=60)
timeout 120 apt-get "${options[@]}" update >/dev/null 2>&1
timeout 600 apt-get "${options[@]}" install -y --no-install-recommends chromium chromium-driver >/dev/null 2>&1 ||
    echo "chromium cannot be installed: the tests of the trackers' pages are skipped" >&2
exit 0
