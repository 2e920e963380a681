# shellcheck shell=bash disable=SC2034 # variables are for those who source this
# What the scripts share. Sourced by bash, not run.
#
# SPDX-License-Identifier: Apache-2.0
#
# Nothing here is started at the moment of sourcing. Functions say what they do
# in one line each; die() ends the script that sourced this file.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# Of a job of bfcd that runs a script; meson.build has the same list for tests.
unset BFC_ADMIN_SOCKET BFC_CACHE BFC_INHERIT BFC_MONITOR_SOCKET BFC_PARTITION BFC_PRELOAD BFC_RETURN_MS BFC_SOCKET \
        BFC_STRICT BFC_TENANT BFC_TRACE BFC_WAIT_MS

# The version of the project, and the time of its files: that of the last commit, or of 1980, from which archives have times.
project_version() { sed -n "s/^  version: '\(.*\)',/\1/p" "$root/meson.build" | head -n 1; }
set_time() { export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 315532800)}; }

say() { printf '%s\n' "$*"; }
die() {
        printf '%s: %s\n' "${0##*/}" "$*" >&2
        exit 1
}

# Package on Debian and Ubuntu, and how its presence shows on any system:
# cmd: a program, pc: a pkg-config module, file: a file, fn: a function here.
needs_demo='
build-essential       cmd:cc
build-essential       file:/usr/include/stdlib.h
pkg-config            cmd:pkg-config
python3               cmd:python3
meson                 cmd:meson
ninja-build           cmd:ninja
libmicrohttpd-dev     pc:libmicrohttpd
libuv1-dev            pc:libuv
libprotobuf-c-dev     pc:libprotobuf-c
protobuf-c-compiler   cmd:protoc-c
libyaml-dev           pc:yaml-0.1
libjansson-dev        pc:jansson
'
needs_build="$needs_demo
libncurses-dev        pc:ncursesw
"
needs_test="$needs_build
check                 pc:check
scdoc                 cmd:scdoc
jq                    cmd:jq
tmux                  cmd:tmux
python3-numpy         fn:has_python_modules
python3-pytest        fn:has_python_modules
"
needs_lint='
python3               cmd:python3
shellcheck            cmd:shellcheck
clang-format          cmd:clang-format
codespell             cmd:codespell
'
# Only scripts/test-kubernetes. Go is no package of it: Debian's is too old.
needs_kubernetes='
protobuf-compiler     cmd:protoc
'
# Only scripts/test-kubernetes --cluster.
needs_cluster='
runc                  cmd:runc
containernetworking-plugins  file:/usr/lib/cni/bridge
iptables              cmd:iptables
iproute2              cmd:ip
openssl               cmd:openssl
busybox-static        cmd:busybox
prometheus            cmd:prometheus
'
# Only .ci/run asks for these.
needs_ci="$needs_test$needs_lint
abigail-tools         cmd:abidw
cppcheck              cmd:cppcheck
prometheus            cmd:promtool
python3-pip           fn:has_pip
python3-venv          fn:has_venv
systemd-journal-remote  file:/lib/systemd/systemd-journal-remote
chromium              cmd:chromium
chromium-driver       cmd:chromedriver
python3-selenium      fn:has_selenium
clang                 cmd:clang
libclang-rt-dev       fn:has_libfuzzer
"
# Of scripts/torture --fuzz. Compiler and runtime may be of different packages.
needs_fuzz='
clang                 cmd:clang
libclang-rt-dev       fn:has_libfuzzer
'
# Only scripts/nightly.
needs_nightly="$needs_ci$needs_fuzz
valgrind              cmd:valgrind
podman                cmd:podman
crun                  cmd:crun
uidmap                cmd:newuidmap
munge                 cmd:munged
slurmctld             cmd:slurmctld
slurmd                cmd:slurmd
slurm-client          cmd:sinfo
libslurm-dev          file:/usr/include/slurm/spank.h
"
has_pip() { python3 -m pip --version >/dev/null 2>&1; }
has_venv() { python3 -c 'import ensurepip' >/dev/null 2>&1; }
has_selenium() { /usr/bin/python3 -c 'import selenium' >/dev/null 2>&1; }
has_libfuzzer() {
        echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
                clang -fsanitize=fuzzer,address,undefined -x c -o /dev/null - >/dev/null 2>&1
}

# Of the system's Python: another one on PATH may lack them.
has_python_modules() { /usr/bin/python3 -c 'import numpy, pytest' >/dev/null 2>&1; }

is_present() {
        case $1 in
        cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
        pc:*) pkg-config --exists "${1#pc:}" >/dev/null 2>&1 ;;
        file:*) test -e "${1#file:}" ;;
        fn:*) "${1#fn:}" ;;
        esac
}

# missing_packages LIST: the packages of LIST that are not there, on one line.
missing_packages() {
        local package probe found=''

        while read -r package probe; do
                [ -n "$package" ] || continue
                is_present "$probe" && continue
                case " $found " in *" $package "*) continue ;; esac
                found="${found:+$found }$package"
        done <<<"$1"
        printf '%s' "$found"
}

is_debian() {
        [ -r /etc/os-release ] && command -v apt-get >/dev/null 2>&1 || return 1
        (
                ID='' ID_LIKE=''
                # shellcheck source=/dev/null
                . /etc/os-release
                case " $ID $ID_LIKE " in *' debian '* | *' ubuntu '*) exit 0 ;; esac
                exit 1
        )
}

# install_packages LIST: installs what is missing of LIST, or says what is and stops.
install_packages() {
        local missing as_root=''

        missing=$(missing_packages "$1")
        [ -n "$missing" ] || return 0
        if ! is_debian; then
                say "These packages are missing (Debian's names): $missing" >&2
                die "can install packages on Debian and Ubuntu only; install the like of these and run it again"
        fi
        if [ "$(id -u)" -ne 0 ]; then
                command -v sudo >/dev/null 2>&1 ||
                        die "needs root to install packages, and there is no sudo; as root: apt-get install $missing"
                as_root=sudo
        fi
        say "Installing packages${as_root:+ with sudo}: $missing"
        # shellcheck disable=SC2317 # called through quietly
        apt_get() { $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" </dev/null; }
        quietly 'apt-get update' apt_get update
        # shellcheck disable=SC2086 # a list of words
        quietly 'apt-get install' apt_get install -y --no-install-recommends $missing
        missing=$(missing_packages "$1")
        [ -z "$missing" ] || die "still missing after apt-get install: $missing"
}

# quietly WHAT COMMAND...: shows the command's output only where it fails, and then ends the script.
quietly() {
        local what=$1 log status=0 ticker

        shift
        log=$(mktemp)
        tell_minutes "$what" 9>&- &
        ticker=$!
        "$@" >"$log" 2>&1 || status=$?
        kill "$ticker"
        wait "$ticker" 2>/dev/null || true
        if [ "$status" -ne 0 ]; then
                cat "$log" >&2
                rm -f "$log"
                die "$what failed with status $status (its output is above)"
        fi
        rm -f "$log"
}

# tell_minutes WHAT: a line each minute, until it is killed or the script has ended. It waits without a sleep, which would
# live on and keep the output open.
tell_minutes() {
        local pause n

        trap 'exit 130' INT
        exec {pause}<> <(:)
        for ((n = 1; ; n++)); do
                read -r -t 60 -u "$pause" || kill -0 "$$" 2>/dev/null || exit
                say "  $1: $n min"
        done
}

# lock_folder DIR: makes DIR and waits until no other script works in it. The lock is fd 9; it ends with
# the script or with unlock_folder. Started programs that live on must not inherit it: 9>&-.
lock_folder() {
        mkdir -p "$1" 2>/dev/null || die "cannot make $1"
        [ -w "$1" ] || die "cannot write to $1 (was it made by another user?)"
        exec 9<"$1"
        if ! flock -n 9; then
                say "Another run works in $1; waiting for it"
                flock 9
        fi
}
unlock_folder() { exec 9<&-; }

# configure DIR [-Dmeson=option...]: locks DIR and sets it up, or anew where the options or the installed packages have
# changed: Meson does not look again for what it did not find.
configure() {
        local dir=$1 given

        shift
        lock_folder "$dir"
        [ -z "${BFC_CUDA_INCLUDE:-}" ] || set -- "$@" -Dnvidia_include="$BFC_CUDA_INCLUDE"
        refuse_moved "$dir"
        given="$* $(stat -c %Y /var/lib/dpkg/status 2>/dev/null)"
        if [ ! -f "$dir/build.ninja" ]; then
                quietly "meson setup $dir" meson setup "$dir" "$root" "$@"
        elif [ "$(cat "$dir/options-given" 2>/dev/null)" != "$given" ]; then
                quietly "meson configure $dir" meson configure "$dir" --clearcache "$@"
                quietly "meson setup $dir" meson setup --reconfigure "$dir"
        fi
        printf '%s\n' "$given" >"$dir/options-given"
}

# refuse_moved DIR: what is built has the name of its folder in it.
refuse_moved() {
        local was

        [ -f "$1/build.ninja" ] || return 0
        was=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["directories"]["build"])' \
                "$1/meson-info/meson-info.json")
        [ "$was" = "$(realpath "$1")" ] ||
                die "$1 was built as $was, and its programs have that name in them; remove it: rm -r ${1@Q}"
}

# build_targets DIR [TARGET...]: builds them, or all. Ninja shows how far it is on one line of a terminal; elsewhere a
# line comes every half minute.
build_targets() {
        local dir=$1

        shift
        if [ -t 1 ]; then
                ninja -C "$dir" "$@" || die "building in $dir failed"
                return 0
        fi
        if ! ninja -C "$dir" "$@" 2>&1 | tee "$dir/ninja.log" | print_progress; then
                grep -v '^\[' "$dir/ninja.log" >&2
                die "building in $dir failed (its output is above)"
        fi
}

print_progress() {
        awk -v step=30 'BEGIN { srand(); last = srand() }
                /^\[[0-9]+\/[0-9]+\]/ { srand(); now = srand()
                        if (now - last >= step) { print "  " substr($1, 2, length($1) - 2) " built"; fflush(); last = now } }'
}

# build DIR [-Dmeson=option...]: configures DIR and builds all.
build() {
        configure "$@"
        build_targets "$1"
}

# ---- tests ----

# Of build-test, and of build-release.
debug_options=(-Dwerror=true -Dtests=enabled -Dbuildtype=debug)
release_options=(-Dwerror=true -Dtests=enabled -Dbuildtype=release -Ddebug=true)

# Meson defines these tests only where their packages are installed; the second list in builds without sanitizers.
optional_tests=(exporter bfcctl-top)
optional_plain_tests=(page grafana)

# defines DIR NAME...: whether the build folder has these tests.
defines() {
        local name status=0

        for name in "${@:2}"; do
                grep -q "\"name\": \"$name\"" "$1/meson-info/intro-tests.json" && continue
                say "$1 does not define the test $name; is its package installed?"
                status=1
        done
        return "$status"
}

# The sanitizers of CI's functional build. Freed memory is kept for a while so that its use is seen; less of it than by
# default, because every page costs a fault in each of thousands of processes.
sanitizer_options=('-Db_sanitize=address,undefined' -Db_lundef=false)
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:detect_stack_use_after_return=1:quarantine_size_mb=16}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-halt_on_error=1:print_stacktrace=1}

# No werror: the compiler warns of a fence that ThreadSanitizer does not follow, in code of one thread.
thread_options=(-Dwerror=false -Dtests=enabled -Dbuildtype=debug -Db_sanitize=thread -Db_lundef=false)
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:die_after_fork=0}

# find_inputs: what tests use and the checkout lacks: NVIDIA's cuda.h, from the package index (BFC_CUDA_INCLUDE), and real
# traces, where the machine has them beside the checkout (BFC_TRACES).
find_inputs() {
        local folder=${XDG_CACHE_HOME:-$HOME/.cache}/bfcd/cuda-headers traces=$root/../shared/traces

        export BFC_CUDA_INCLUDE=${BFC_CUDA_INCLUDE:-$folder/nvidia/cuda_runtime/include}
        [ -f "$BFC_CUDA_INCLUDE/cuda.h" ] || fetch_cuda_headers "$folder" || die "NVIDIA's cuda.h could not be fetched"
        [ -n "${BFC_TRACES:-}" ] || [ ! -d "$traces" ] || BFC_TRACES=$(cd "$traces" && pwd)
        [ -z "${BFC_TRACES:-}" ] || export BFC_TRACES
}

# fetch_cuda_headers FOLDER: another checkout's run may do the same, so a complete folder takes its place.
fetch_cuda_headers() {
        local new

        mkdir -p "${1%/*}" && new=$(mktemp -d "$1.XXXXXX") || return 1
        python3 -m pip download --quiet --no-deps --dest "$new" nvidia-cuda-runtime-cu12==12.8.90 &&
                (cd "$new" && python3 -m zipfile -e ./*.whl .) && rm -rf "$1" && mv -T "$new" "$1" && return 0
        rm -rf "$new"
        return 1
}

# Or (--suite bfcd): the whole project. A suite that is asked for overrides what the default setup leaves out.
which_tests=(--no-suite nightly)
# run_tests DIR [MESON TEST ARGUMENT...]: runs tests, a line for each as it ends, and counts them. What they need is
# built if it is not. Tests wait more than they compute, so there are more of them at a time than processors.
run_tests() {
        local dir=$1 status=0 named=() left_out=()

        shift
        read_arguments "$@"
        rm -f "$dir/meson-logs/testlog.json"
        # The output of those that fail follows their line.
        meson_test "$dir" --num-processes $(($(nproc) * 2)) "${which_tests[@]}" "$@" || status=$?
        [ -s "$dir/meson-logs/testlog.json" ] || die "no test was run${named:+ of: ${named[*]#--named=}}"
        # A run that --maxfail ends has no result of some tests.
        [ "$status" -eq 0 ] || case " $*" in *' --maxfail'*) named=() ;; esac
        "$root/scripts/count-tests" --slowest 10 "${left_out[@]}" "${named[@]}" "${dir##*/}=$dir" || status=1
        return "$status"
}

# meson_test DIR ARGUMENT...: older versions of ThreadSanitizer do not expect the layout of addresses of newer kernels.
meson_test() {
        local dir=$1 runner=()

        shift
        [ "${dir##*/}" != build-tsan ] || ! setarch "$(uname -m)" -R true 2>/dev/null || runner=(setarch "$(uname -m)" -R)
        PYTHONUNBUFFERED=1 "${runner[@]}" meson test -C "$dir" --print-errorlogs "$@" 2>&1 </dev/null 9>&-
}

# read_arguments MESON TEST ARGUMENT...: sets named to --named=NAME for each test that the arguments name, because Meson
# leaves out silently what it does not find, and left_out to --left-out=SUITE for each suite.
read_arguments() {
        while [ $# -gt 0 ]; do
                case $1 in
                --suite) left_out+=("--left-out=${2:-}") && shift ;;
                --no-suite | --maxfail | --repeat | --timeout-multiplier | -t | --wrapper | --test-args) shift ;;
                -*) ;;
                *) named+=("--named=$1") ;;
                esac
                [ $# -eq 0 ] || shift
        done
        [ ${#left_out[@]} -gt 0 ] || left_out=(--left-out=bfcd)
        [ ${#named[@]} -eq 0 ] || left_out=()
}

# Programs in which threads meet most: the library, called from many, and the daemon's loop and workers.
thread_tests=(client client-cache magazine pool recorder streams host worker turns fd-guard ledger basic frameworks
        streams-at-work-cuda-fd gpu-cuda-fd standby park)
# The nightly run has these, too.
more_thread_tests=(reconnect quota death record streams_model streams-at-work streams-at-work-cuda-ipc retire-cuda-fd
        gpu-cuda-ipc records accounts bfcctl-top sent_fds standby-cuda-fd)
