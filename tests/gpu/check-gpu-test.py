#!/usr/bin/env python3
# Runs scripts/gpu-test with programs that do nothing but log their cases: does it run each case to its end, once,
# whatever stops it in between?
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-gpu-test.py ROOT     prints TAP
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = sys.argv[1]
CASES = ("one", "two", "three")
SUITES = ("conformance", "backend", "broker")
FILES = ("bfcd", "bfcctl", "bfc-replay", "libbfcclient.so.0", "experiments") + SUITES
LIMIT_S = 60

# Logs "start NAME" and "end NAME". A case in $HANG does not end, unless it is the first of a call. $SLOW takes
# longer than the limit of a call.
STUB = r"""#!/usr/bin/env bash
me=${0##*/} name=${BFC_TEST_ONLY-}
if [ "$me" = experiments ]; then
        for name in "$@"; do :; done
        [ "$name" != --list ] || { printf '%s  a question\n' one two three; exit; }
elif [ -n "${BFC_TEST_LIST-}" ]; then
        printf '# test %s\n' one two three
        exit
fi
before=$(tail -n 1 "$LOG")
[ -z "${LOG_FOLDER-}" ] || echo "$GPU_TEST_WORK" >"$LOG_FOLDER"
echo "start $me/$name" >>"$LOG"
case " ${HANG-} " in *" $me/$name "*) [ "$before" = call ] || exec sleep 1000 ;; esac
[ "${SLOW-}" != "$me/$name" ] || sleep 3
if [ "${LOOK-}" = "$me/$name" ]; then
        setpriv --reuid 65534 --regid 65534 --clear-groups test -x "$0" && echo 'reachable' >>"$LOG"
fi
echo "end $me/$name" >>"$LOG"
[ "${FAIL-}" != "$me/$name" ] || { echo "not ok 1 - $name"; exit 1; }
echo "ok 1 - $name"
"""


class Bench:
    """A build of stubs, a log of their cases, and a results folder."""

    def __init__(self, folder, **environment):
        self.folder = folder
        self.log = os.path.join(folder, "log")
        self.build = os.path.join(folder, "build")
        self.environment = {**os.environ, "LOG": self.log, **environment}
        os.makedirs(os.path.join(self.build, "fake"))
        open(self.log, "w").close()
        for name in FILES + ("fake/libcuda.so.1",):
            path = os.path.join(self.build, name)
            with open(path, "w", encoding="utf-8") as f:
                f.write(STUB)
            os.chmod(path, 0o755)

    def start(self, *options):
        with open(self.log, "a", encoding="utf-8") as f:
            f.write("call\n")
        command = [os.path.join(ROOT, "scripts/gpu-test"), "--fake", "--results", os.path.join(self.folder, "results"),
                   "--only", f"@(experiments|{'|'.join(SUITES)})", *options, self.build]
        return subprocess.Popen(command, env=self.environment, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def call(self, *options):
        run = self.start(*options)
        self.output = run.communicate()[0]
        return run.returncode

    def logged(self, word):
        with open(self.log, encoding="utf-8") as f:
            return [line[len(word) + 1:-1] for line in f if line.startswith(word + " ")]

    def done(self):
        with open(os.path.join(self.folder, "results/done.tsv"), encoding="utf-8") as f:
            return {name: status for status, _, name in (line.rstrip("\n").split("\t") for line in f)}

    def n_done(self):
        with open(os.path.join(self.folder, "results/done.tsv"), encoding="utf-8") as f:
            return sum(1 for _ in f)

    def check_all_ended_once(self):
        ended = self.logged("end")
        expected = {f"{suite}/{case}" for suite in SUITES + ("experiments",) for case in CASES}
        assert expected <= set(ended), f"not run to the end: {expected - set(ended)}\n{self.output}"
        assert len(ended) == len(set(ended)), f"run twice: {sorted(ended)}"
        assert set(self.done()) == set(ended), f"recorded: {sorted(self.done())}"
        assert self.n_done() == len(ended), "a case is recorded twice"


def one_call(folder):
    bench = Bench(folder)
    status = bench.call()
    assert status == 0, f"status {status}: {bench.output}"
    bench.check_all_ended_once()
    assert bench.logged("start") == bench.logged("end")
    assert bench.logged("start").index("conformance/one") < bench.logged("start").index("experiments/one")
    assert bench.call() == 0 and len(bench.logged("start")) == len(bench.logged("end")), "run again"
    bench.check_all_ended_once()


def calls_with_a_limit(folder):
    bench = Bench(folder, HANG="experiments/capture-wait backend/two broker/one", SLOW="backend/three")
    statuses = []
    while not statuses or statuses[-1] == 3:
        statuses.append(bench.call("--limit", "2"))
        assert len(statuses) < 60, bench.output  # more than there are cases
        assert (statuses[-1] == 3) == ("Left: " in bench.output), bench.output
    assert statuses[-1] == 0 and len(statuses) > 1, f"{statuses}: {bench.output}"
    bench.check_all_ended_once()


def a_failed_case(folder):
    bench = Bench(folder, FAIL="conformance/two", HANG="backend/two")
    assert bench.call("--limit", "2") == 3, bench.output
    status = 3
    while status == 3:
        status = bench.call("--limit", "2")
    assert status == 1 and "Failed: conformance/two" in bench.output, f"{status}: {bench.output}"
    bench.check_all_ended_once()
    assert bench.done()["conformance/two"] == "failed" and list(bench.done().values()).count("failed") == 1
    assert bench.call() == 1, "a failure is forgotten"
    bench.check_all_ended_once()


def a_killed_call(folder):
    work = os.path.join(folder, "work")
    bench = Bench(folder, HANG="broker/two", LOG_FOLDER=work)
    run = bench.start()
    deadline = time.monotonic() + LIMIT_S
    while "broker/two" not in bench.logged("start"):
        assert time.monotonic() < deadline and run.poll() is None, "the case has not started"
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    with open(work, encoding="utf-8") as f:
        shutil.rmtree(f.read().strip())  # the killed script could not
    with open(os.path.join(folder, "results/done.tsv"), "a", encoding="utf-8") as f:
        f.write("pas")  # a line that was not written whole
    status = bench.call()
    assert status == 0, f"status {status}: {bench.output}"
    with open(os.path.join(folder, "results/done.tsv"), encoding="utf-8") as f:
        lines = f.readlines()
    with open(os.path.join(folder, "results/done.tsv"), "w", encoding="utf-8") as f:
        f.writelines(line for line in lines if line != "pas\n")
    bench.check_all_ended_once()


def a_part(folder):
    bench = Bench(folder)
    assert bench.call("--only", "broker/t*") == 0, bench.output
    assert bench.logged("end") == ["broker/two", "broker/three"], bench.logged("end")
    assert bench.call("--only", "no-such-case") == 1 and "no case matches" in bench.output, bench.output


def another_user_reaches_the_programs(folder):
    if os.geteuid() != 0:
        return "needs root"
    os.chmod(folder, 0o700)
    bench = Bench(folder, LOOK="experiments/one")
    assert bench.call("--only", "experiments/one") == 0, bench.output
    with open(bench.log, encoding="utf-8") as f:
        assert "reachable\n" in f, "another user cannot run what gpu-test runs"
    return None


def main():
    tests = (one_call, calls_with_a_limit, a_failed_case, a_killed_call, a_part, another_user_reaches_the_programs)
    n_failed = 0
    print(f"1..{len(tests)}")
    for i, test in enumerate(tests, 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                why = test(folder)
                print(f"ok {i} - {test.__name__}{' # SKIP ' + why if why else ''}", flush=True)
            except AssertionError as error:
                n_failed += 1
                print(f"not ok {i} - {test.__name__}", flush=True)
                print("# " + str(error).replace("\n", "\n# "), flush=True)
    return 1 if n_failed else 0


sys.exit(main())
