# One run at a time works in a sandbox, and a restore that was killed is undone, or finished, by whoever comes next.
# The script before this defines cache, turn_wait (seconds) and fail CODE MESSAGE RETRYABLE.
turn="$cache/.turn-sh" swap="$cache/.swap-sh"
# Names are bytes, in whatever language.
LC_ALL=C
export LC_ALL
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
# Lists have a name a line. A newline in a name is written as the character that separates units, which no name with a place in
# a list has: real LINE puts the name itself into file.
unit=$(printf '\037')
names() { tr '\n\000' '\037\n'; }
real() {
    file=$1
    case "$file" in *"$unit"*) file=$(printf '%s.' "$1" | tr '\037' '\n') file=${file%.} ;; esac
}
# A swap is written down before the first file is moved: where the files are staged, where some are set aside, whose memory it is, the
# name of its lineage, the memory that was here before; then the name and folder of each root. Names of old and new files, and of
# folders that were made, are in lists beside the staged ones. The first line begins with "2 " where an old file's name has a newline:
# sidecars that would take the line in the list for the name itself refuse that.
put_back() {
    IFS= read -r from && IFS= read -r spared && IFS= read -r line && IFS= read -r line && IFS= read -r line || return 1
    coded=""
    case "$from" in "2 "*) from=${from#2 } coded=yes ;; esac
    case "$from" in /tmp/memory-sidecar-*/*) return 1 ;; /tmp/memory-sidecar-*.unpacked) ;; *) return 1 ;; esac
    case "$spared" in "$cache/set-aside/"*/*) return 1 ;; "$cache/set-aside/"?*) ;; *) return 1 ;; esac
    while read -r name folder; do
        case "$name/$folder/" in */../*) return 1 ;; esac
        if [ -f "$from/$name.putting" ]; then
            while IFS= read -r line; do
                real "$line"
                case "/$file/" in */../*) return 1 ;; esac
                rm -f "$folder/$file"
            done < "$from/$name.put"
        fi
        if [ -f "$from/$name.made" ]; then
            sort -r "$from/$name.made" > "$from/made" || return 1
            while IFS= read -r line; do
                real "$line"
                case "/$file/" in */../*) return 1 ;; esac
                rmdir "$folder/$file" 2>/dev/null
            done < "$from/made"
        fi
        [ -f "$from/$name.old" ] || continue
        while IFS= read -r line; do
            file=$line
            [ -z "$coded" ] || real "$line"
            case "/$file/" in */../*) return 1 ;; esac
            for old in "$from/old/$name/$file" "$spared/$name/$file"; do
                # Between file systems a move is a copy: one that was cut short has left the old file where it was.
                if there_is "$folder/$file" || ! there_is "$old"; then continue; fi
                mkdir -p "$folder/${file%/*}" && mv "$old" "$folder/$file.memory-sidecar" && mv "$folder/$file.memory-sidecar" "$folder/$file" || return 1
            done
        done < "$from/$name.old"
    done
    rm -rf "$spared" "$from"
}
undo() { put_back < "$swap" && rm -f "$swap"; }
# All is in place: note whose memory it is, and see to its folders. They get their modes last, for some may not be written to;
# those of the old memory that nothing is left in go.
settle() {
    IFS= read -r from && IFS= read -r spared && IFS= read -r whose && IFS= read -r history && IFS= read -r before || return 1
    from=${from#2 }
    case "$whose$before" in */*) return 1 ;; esac
    rm -f "$cache/$whose"/index-*
    if [ -f "$cache/$whose/$history.new" ]; then
        rm -f "$cache/$whose/lineage" "$cache/$whose/read-lineage" "$cache/$whose/part-lineage"
        mv -f "$cache/$whose/$history.new" "$cache/$whose/$history" || return 1
    fi
    [ ! -f "$cache/$whose/notes.new" ] || mv -f "$cache/$whose/notes.new" "$cache/$whose/notes" || return 1
    [ -z "$before" ] || rm -f "$cache/$before/lineage" "$cache/$before/read-lineage" "$cache/$before/part-lineage" "$cache/$before/notes"
    case "$from" in /tmp/memory-sidecar-*/*) return 0 ;; /tmp/memory-sidecar-*.unpacked) ;; *) return 0 ;; esac
    while read -r name folder; do
        case "$name/$folder/" in */../*) return 1 ;; esac
        [ -f "$from/$name.folders" ] && [ -f "$from/$name.modes" ] || continue
        while IFS= read -r line; do
            real "$line"
            case "/$file/" in */../*) return 1 ;; esac
            [ -d "$from/new/$name/$file" ] || rmdir "$folder/$file" 2>/dev/null
        done < "$from/$name.folders"
        sort -r "$from/$name.modes" > "$from/modes"
        while IFS= read -r line; do
            real "${line% *}"
            case "/$file/" in */../*) return 1 ;; esac
            chmod "${line##* }" "$folder/$file" 2>/dev/null
        done < "$from/modes"
    done
    # First what says which folders go: without the new ones beside it, it would be wrong.
    rm -f "$from"/*.folders && rm -rf "$from"
}
finish() { settle < "$swap.done" && rm -f "$swap.done"; }
if [ -f "$swap.done" ]; then finish || fail journal-damaged "What a restore left behind in $swap.done cannot be read."; fi
if [ -f "$swap" ]; then undo || fail journal-damaged "A restore that was cut short could not be undone: see $swap."; fi
