# What is completed is what the programs' help says they take, no more and no less.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: bash check-completions.bash BFCD BFCCTL BFC-REPLAY [BFC-EXPORTER]    TAP on standard output
here=${BASH_SOURCE[0]%/*} n=0 failed=0
unset BFC_SOCKET BFC_ADMIN_SOCKET BFC_MONITOR_SOCKET
for program in "$@"; do PATH=${program%/*}:$PATH; done

is() { # NAME GOT EXPECTED
        n=$((n + 1))
        if [ "$2" = "$3" ]; then
                echo "ok $n - $1"
        else
                echo "not ok $n - $1"
                printf '# got       %s\n# expected  %s\n' "$2" "$3"
                failed=1
        fi
}

# shellcheck disable=SC2317 # there only while a completion runs
compopt() { :; }

# complete WORD...: what the last word may become, sorted, on one line.
complete_words() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        "_${1//-/_}" "$1" "${!#}" "${*: -2:1}"
        printf '%s\n' "${COMPREPLY[@]}" | sort -u | paste -sd' '
}
helped() { # PROGRAM PATTERN: what of its help is like this
        "$1" --help | grep -oE -- "$2" | sort -u | paste -sd' '
}

for program in "$@"; do
        # shellcheck source=/dev/null
        . "$here/${program##*/}"
done

is 'options of bfcd' "$(complete_words bfcd -)" "$(helped bfcd '--[a-z-]+')"
is 'levels of bfcd' "$(complete_words bfcd --log-level '')" 'debug error info notice warning'
is 'options of bfc-replay' "$(complete_words bfc-replay --)" "$(helped bfc-replay '--[a-z-]+')"
# It is built only if libmicrohttpd is installed.
case "$*" in
*/bfc-exporter)
        is 'options of bfc-exporter' "$(complete_words bfc-exporter --)" "$(helped bfc-exporter '--[a-z-]+')"
        is 'a file for --listen of bfc-exporter' "$(complete_words bfc-exporter --listen "$here/check-c")" \
                "$here/check-completions.bash"
        ;;
esac
is 'options of bfcctl' "$(complete_words bfcctl --)" '--help --json --socket --version --wide'
commands=$(bfcctl --help | sed -nE 's/^  ([a-z][a-z-]+)( .*)?$/\1/p' | sort -u | paste -sd' ')
is 'commands of bfcctl' "$(complete_words bfcctl '' | tr ' ' '\n' | grep -v '^-' | paste -sd' ')" "$commands"
of_commands=$(for c in $commands; do complete_words bfcctl "$c" -; done | tr ' ' '\n' | sort -u | grep . | paste -sd' ')
is 'options of its commands' "$of_commands" \
        "$(bfcctl --help | sed -n '/^  -s/q; p' | grep -v '^Usage' | grep -oE -- '--[a-z-]+' | sort -u | paste -sd' ')"
is 'a command after a socket' "$(complete_words bfcctl --socket /nowhere who)" whoami
is 'none where none is' "$(complete_words bfcctl config '')" ''

# Names that users choose. A command or an expansion in them would leave another name, or the file "run".
marks=$(mktemp -d)
trap 'rm -r "$marks"' EXIT
: >"$marks/file"
names=("\$(>$marks/run)" "\`>$marks/run\`" "$marks/*" "\${x:=y}" "a'b" 'a\b' '~' plain)
# shellcheck disable=SC2317 # there only while a completion runs
bfcctl() { # every list has them in each column
        local name

        printf 'HEADER\nDEVICE\n'
        for name in "${names[@]}"; do printf '%s %s %s\n' "$name" "$name" "$name"; done
}
quoted=$(printf '%q\n' "${names[@]}" | sort -u | paste -sd' ')
for words in 'bfcctl forget' 'bfcctl forget tenant' 'bfcctl explain' 'bfcctl map' 'bfcctl wait room' 'bfcctl trim' 'bfcctl park' 'bfcctl wake' \
        'bfcctl evict' 'bfcctl reset-peaks' 'bfcctl drain' 'bfcctl resume' 'bfcctl top --tenant' 'bfcctl top --partition' \
        'bfc-replay --partition' 'bfc-replay --tenant'; do
        # shellcheck disable=SC2086 # these are words
        got=$(complete_words $words '' | tr ' ' '\n' | grep -vE '^(--.*|DEVICE)$' | paste -sd' ')
        is "names after '$words' are quoted" "$got" "$quoted"
done
is 'no name was run' "$(ls "$marks")" file
echo "1..$n"
exit $failed
