# Restore without Python: unpack beside the target, compare with the list of sums, then move old files out and new ones in.
# The preamble defines nonce, echo_back (JSON), turn_wait, notes (the beginning of a JSON object), key, snapshot, bundle, bytes, mode, roots and,
# for each root N: name_N, folder_N, needed_N (a file a line), select_N. And of what is there: stored, heads and keep (snapshots of
# this memory), saved, discard and reader (yes, or nothing), aside_bytes and aside_name.
cache="${XDG_CACHE_HOME:-$HOME/.cache}/memory-sidecar"
umask 022
escaped() { printf '%s' "$1" | sed 's/[\\"]/\\&/g' | tr '\n\t' '  '; }
answer() { printf '\nmemory-sidecar %s begin\n{"status":"%s",%s%s}\nmemory-sidecar %s end\n' "$nonce" "$1" "$echo_back" "$2" "$nonce"; }
stages=""
leave() { for stage in $stages; do rm -rf "$stage"; done; rm -f "$bundle"; }
fail() { leave; answer error ",\"error\":{\"code\":\"$1\",\"message\":\"$(escaped "$2")\",\"retryable\":${3:-false}}"; exit 0; }
# <turn>
# The snapshots that the memory with this key was restored from and exported to, newest first.
lineage_of() {
    for file in "$cache/$1/read-lineage" "$cache/$1/lineage"; do
        if [ -f "$file" ]; then sed -n '/^[0-9A-Za-z-]\{1,64\}$/p' "$file" | tail -n 100 | sed -n '1!G;h;$p'; return; fi
    done
}
# Whose memory is here: this one's, or else the one that was noted last.
owner="" newest="" origin="" there=0
[ -z "$(lineage_of "$key")" ] || owner=$key
if [ -z "$owner" ]; then
    for file in $(cd "$cache" 2>/dev/null && ls -t */read-lineage */lineage 2>/dev/null); do owner=${file%/*}; break; done
fi
for one in $(lineage_of "$key"); do
    case " $stored " in *" $one "*) newest=${newest:-$one} ;; esac
    # What was exported since and did not become the head is in the store beside it.
    case " $heads " in *" $one "*) origin=$one; break ;; esac
done
ahead=yes
for root in $roots; do
    eval "folder=\$folder_$root"
    count=$( ( [ -d "$folder" ] && cd "$folder" && "select_$root" -print ) 2>/dev/null | wc -l)
    there=$((there + count))
    [ "$((count))" -gt 0 ] || ahead=no
    eval "needed=\$needed_$root"
    lost=$(printf '%s\n' "$needed" | while IFS= read -r file; do [ -z "$file" ] || [ -e "$folder/$file" ] || printf x; done)
    [ -z "$lost" ] || ahead=no
done
# What changed cannot be told without Python. A sandbox that holds the snapshot is left as it is, unless all of a root is gone,
# or something that the memory cannot do without.
was_reader=""
[ ! -f "$cache/$key/read-lineage" ] || was_reader=yes
if [ "$mode" = replace ] && [ -z "$discard$saved" ] && [ "$there" -gt 0 ]; then
    if [ -n "$origin" ] && [ "$ahead" = yes ] && [ "$reader" = "$was_reader" ]; then
        told=""
        [ "$newest" = "$origin" ] || told=",\"warnings\":[\"What was exported from here since then ($newest) is stored beside the head.\"]"
        case " $keep " in *" $origin "*) leave; answer kept ",\"holds\":\"$origin\",\"files\":$there$told"; exit 0 ;; esac
    fi
    if [ -n "$owner" ]; then
        rows=$(lineage_of "$owner" | sed 's/.*/"&"/' | tr '\n' ',' | sed 's/,$//')
        answer unsaved ",\"unsaved\":[{\"memory\":\"\",\"key\":\"$(escaped "$owner")\",\"lineage\":[$rows],\"files\":$there}]"
        exit 0
    fi
fi
[ "$(($(wc -c < "$bundle")))" = "$bytes" ] || fail upload-damaged "The upload did not arrive whole." true
unpacked="${bundle%.bundle}.unpacked"
stages="$unpacked"
( umask 077; mkdir -p "$unpacked" ) && gzip -dc "$bundle" | ( cd "$unpacked" && tar -xpf - ) || fail disk-full "The memory could not be unpacked."
checked=true
if command -v sha256sum >/dev/null 2>&1; then
    ( cd "$unpacked/new" && sha256sum -c --quiet ../sums >/dev/null 2>&1 || sha256sum -c ../sums >/dev/null 2>&1 ) || fail incomplete "Not every file arrived as it was."
else
    checked=false
fi
move() { # move every listed file from $1 to $2, as far as it goes
    while IFS= read -r file; do
        mkdir -p "$2/$(dirname "$file")" && mv "$1/$file" "$2/$file" || return 1
    done
}
aside="$cache/set-aside/$aside_name"
[ ! -L "$cache/set-aside" ] || fail in-the-way "$cache/set-aside is a link; it has to be a folder."
broken() {
    undo && fail swap-failed "$1"
    stages="" # what was there is still in them: the next run tries again
    fail swap-failed "$1 It could not be undone, either: see $swap."
}
total() { sum=0; while read -r size; do sum=$((sum + size)); done; printf '%s' "$sum"; }
# What goes, and what of that is kept: all of it where nothing was saved, else what was written since.
kept=0 kept_bytes=0
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root"
    : > "$unpacked/$name.old"
    : > "$unpacked/$name.kept"
    [ -d "$unpacked/new/$name" ] && [ -d "$folder" ] && [ "$mode" = replace ] || continue
    ( cd "$folder" && "select_$root" -print ) > "$unpacked/$name.old"
    # A database's old log would spoil the new database.
    ( cd "$unpacked/new/$name" && find . -type f -print ) | while IFS= read -r file; do
        for tail in -wal -shm -journal; do [ ! -e "$folder/$file$tail" ] || printf '%s\n' "$file$tail"; done
    done >> "$unpacked/$name.old"
    sort -u "$unpacked/$name.old" -o "$unpacked/$name.old"
    [ -z "$discard" ] || continue
    if [ -n "$saved" ] && [ -f "$cache/.exported" ]; then
        while IFS= read -r file; do
            [ -z "$( ( cd "$folder" && find "$file" -newer "$cache/.exported" -print ) 2>/dev/null)" ] || printf '%s\n' "$file"
        done < "$unpacked/$name.old" > "$unpacked/$name.kept"
    else
        cat "$unpacked/$name.old" > "$unpacked/$name.kept"
    fi
    kept=$((kept + $(wc -l < "$unpacked/$name.kept")))
    kept_bytes=$((kept_bytes + $( ( cd "$folder" && while IFS= read -r file; do [ -L "$file" ] || wc -c < "$file"; done ) < "$unpacked/$name.kept" | total)))
done
[ "$kept_bytes" -le "$aside_bytes" ] || fail set-aside-full "What is here and in no snapshot is more than the $aside_bytes bytes that are set aside in a sandbox."
[ "$kept" = 0 ] || ( umask 077 && mkdir -p "$aside" ) || fail swap-failed "$aside cannot be made."
folders=""
displaced=""
if [ "$mode" = replace ] && [ "$owner" != "$key" ] && [ "$there" -gt 0 ]; then displaced=$owner; fi
if [ -n "$reader" ]; then history=read-lineage; else history=lineage; fi
{
    printf '%s\n' "$unpacked" "$aside" "$key" "$history" "$displaced"
    for root in $roots; do eval "printf '%s %s\\n' \"\$name_$root\" \"\$folder_$root\""; done
} > "$swap.new" && mv -f "$swap.new" "$swap" || fail disk-full "$swap cannot be written."
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root"
    [ -d "$unpacked/new/$name" ] || continue
    mkdir -p "$folder" || broken "$folder cannot be made."
    ( cd "$unpacked/new/$name" && find . ! -type d -print ) | while IFS= read -r file; do
        if [ "$mode" = seed ] && there_is "$folder/$file"; then continue; fi
        printf '%s\n' "$file"
    done > "$unpacked/$name.put"
    move "$folder" "$aside/$name" < "$unpacked/$name.kept" || broken "An old file in $folder could not be set aside."
    while IFS= read -r file; do
        if there_is "$folder/$file"; then printf '%s\n' "$file"; fi
    done < "$unpacked/$name.old" > "$unpacked/$name.gone"
    move "$folder" "$unpacked/old/$name" < "$unpacked/$name.gone" || broken "An old file in $folder could not be moved."
    : > "$unpacked/$name.putting"
    move "$unpacked/new/$name" "$folder" < "$unpacked/$name.put" || broken "A file could not be put into $folder."
    folders="$folders${folders:+,}\"$name\":\"$(escaped "$(cd "$folder" && pwd -P)")\""
done
files=$(cat "$unpacked"/*.put 2>/dev/null | wc -l)
(
    umask 077
    mkdir -p "$cache/$key" && rm -f "$cache/$key/$history.new" "$cache/$key/notes.new" || exit 1
    printf '%s\n' "$snapshot" > "$cache/$key/$history.new" && printf '%s,"roots":{%s}}' "$notes" "$folders" > "$cache/$key/notes.new"
) || broken "$cache/$key cannot be written to."
mv -f "$swap" "$swap.done" || broken "$swap cannot be renamed."
finish
leave
told=""
if [ "$kept" != 0 ]; then
    told=",\"set_aside\":{\"path\":\"$(escaped "$aside")\",\"files\":$kept,\"bytes\":$kept_bytes}"
    # The newest five stay, as far as there is room.
    number=0 room=$aside_bytes
    for one in $(ls "$cache/set-aside" | sort -r); do
        number=$((number + 1))
        size=$(find "$cache/set-aside/$one" -type f -exec wc -c {} \; | while read -r bytes rest; do printf '%s\n' "$bytes"; done | total)
        room=$((room - size))
        if [ "$number" -gt 5 ] || { [ "$room" -lt 0 ] && [ "$one" != "$aside_name" ]; }; then rm -rf "$cache/set-aside/$one"; fi
    done
fi
answer complete ",\"files\":$((files)),\"checked\":$checked$told"
