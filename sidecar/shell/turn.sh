# One run at a time works in a sandbox, and a restore that was killed is undone, or finished, by whoever comes next.
# The script before this defines cache, turn_wait (seconds) and fail CODE MESSAGE RETRYABLE.
turn="$cache/.turn-sh" swap="$cache/.swap-sh"
( umask 077 && mkdir -p "$cache" ) && [ -w "$cache" ] || fail os-error "$cache cannot be written to."
started() { cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null; }
runs() { if [ -r /proc/self/stat ]; then [ "$(started "$1")" = "${2:-none}" ]; else kill -0 "$1" 2>/dev/null; fi; }
waited=0
until ( set -C && printf '%s %s\n' "$$" "$(started "$$")" > "$turn" ) 2>/dev/null; do
    holder=$(cat "$turn" 2>/dev/null)
    if [ -n "$holder" ] && ! runs $holder; then
        # It was killed. Somebody else may find that at the same time, and have the turn by now.
        mv -f "$turn" "$turn.$$" 2>/dev/null || continue
        if [ "$(cat "$turn.$$")" = "$holder" ]; then rm -f "$turn.$$"; continue; fi
        mv -f "$turn.$$" "$turn"
    elif [ -z "$holder" ] && [ -n "$(find "$turn" -type f -mmin +1 2>/dev/null)" ]; then
        rm -f "$turn"
    fi
    [ "$waited" -lt "$turn_wait" ] || fail sandbox-busy "Another export or restore is running in this sandbox." true
    waited=$((waited + 1))
    sleep 1
done
trap 'rm -f "$turn"' EXIT
there_is() { [ -e "$1" ] || [ -L "$1" ]; }
# A swap is written down before the first file is moved: where the files are staged, where some are set aside, whose memory it is, the
# name of its lineage, the memory that was here before; then the name and folder of each root. Names of old and new files are in lists
# beside the staged ones.
put_back() {
    IFS= read -r from && IFS= read -r spared && IFS= read -r line && IFS= read -r line && IFS= read -r line || return 1
    case "$from" in /tmp/memory-sidecar-*/*) return 1 ;; /tmp/memory-sidecar-*.unpacked) ;; *) return 1 ;; esac
    case "$spared" in "$cache/set-aside/"*/*) return 1 ;; "$cache/set-aside/"?*) ;; *) return 1 ;; esac
    while read -r name folder; do
        case "$name/$folder/" in */../*) return 1 ;; esac
        if [ -f "$from/$name.putting" ]; then
            while IFS= read -r file; do case "/$file/" in */../*) return 1 ;; esac; rm -f "$folder/$file"; done < "$from/$name.put"
        fi
        [ -f "$from/$name.old" ] || continue
        while IFS= read -r file; do
            case "/$file/" in */../*) return 1 ;; esac
            for old in "$from/old/$name/$file" "$spared/$name/$file"; do
                # Between file systems a move is a copy: one that was cut short has left the old file where it was.
                if there_is "$folder/$file" || ! there_is "$old"; then continue; fi
                mkdir -p "$folder/$(dirname "$file")" && mv "$old" "$folder/$file.memory-sidecar" && mv "$folder/$file.memory-sidecar" "$folder/$file" || return 1
            done
        done < "$from/$name.old"
    done
    rm -rf "$spared" "$from"
}
undo() { put_back < "$swap" && rm -f "$swap"; }
# All is in place: note whose memory it is.
finish() {
    { IFS= read -r from && IFS= read -r spared && IFS= read -r whose && IFS= read -r history && IFS= read -r before; } < "$swap.done" || return 1
    case "$whose$before" in */*) return 1 ;; esac
    rm -f "$cache/$whose"/index-*
    if [ -f "$cache/$whose/$history.new" ]; then
        rm -f "$cache/$whose/lineage" "$cache/$whose/read-lineage"
        mv -f "$cache/$whose/$history.new" "$cache/$whose/$history" || return 1
    fi
    [ ! -f "$cache/$whose/notes.new" ] || mv -f "$cache/$whose/notes.new" "$cache/$whose/notes" || return 1
    [ -z "$before" ] || rm -f "$cache/$before/lineage" "$cache/$before/read-lineage" "$cache/$before/notes"
    case "$from" in /tmp/memory-sidecar-*.unpacked) rm -rf "$from" ;; esac
    rm -f "$swap.done"
}
if [ -f "$swap.done" ]; then finish || fail journal-damaged "What a restore left behind in $swap.done cannot be read."; fi
if [ -f "$swap" ]; then undo || fail journal-damaged "A restore that was cut short could not be undone: see $swap."; fi
