# Restore without Python: unpack beside the target, compare with the list of sums, then move old files out and new ones in.
# The preamble defines nonce, echo_back (JSON), turn_wait, notes (the beginning of a JSON object), sandbox, conversation, key, snapshot, bundle, bytes, mode, roots and,
# for each root N: name_N, folder_N, needed_N (a file a line), the words by which look finds its files, yields_N (files that never
# replace one that is there), and, for one that waits until a folder is there, waits_N and waiting_N (JSON). And of what is there:
# stored, heads and keep (snapshots of this memory), saved, discard and reader (yes, or nothing), only (JSON, for a part of the memory),
# aside_bytes and aside_name.
# The bundle has the files and folders in new/NAME, for each root NAME.wanted (a folder and its mode a line, in the order to make them),
# for a part NAME.part (what sed leaves of the names that are in it), and sums and odd: what sha256sum takes, and the same for names that not every sha256sum reads.
cache="${XDG_CACHE_HOME:-$HOME/.cache}/memory-sidecar"
umask 022
escaped() { printf '%s' "$1" | sed 's/[\\"]/\\&/g' | tr '\001-\037' ' '; }
answer() { printf '\nmemory-sidecar %s begin\n{"status":"%s",%s,"home":"%s","user":"%s"%s}\nmemory-sidecar %s end\n' "$nonce" "$1" "$echo_back" "$(escaped "$HOME")" "$(escaped "$(id -un 2>/dev/null || printf %s "${USER-}")")" "$2" "$nonce"; }
stages=""
leave() { for stage in $stages; do rm -rf "$stage"; done; rm -f "$bundle"; }
fail() { leave; answer error ",\"error\":{\"code\":\"$1\",\"message\":\"$(escaped "$2")\",\"retryable\":${3:-false}}"; exit 0; }
# <turn>
# The sign for whoever waits in the sandbox: gone before a restore begins, there when it has ended well. A memory may have its name.
ready="$cache/ready.json"
[ "$key" = ready.json ] || rm -rf "$ready"
# The brief of an earlier restore goes, wherever it was put: if it is still one, and no link is on the way to it.
drop_brief() {
    [ -f "$cache/$key/brief" ] && [ ! -L "$cache/$key/brief" ] || return 0
    IFS= read -r place < "$cache/$key/brief" || :
    rm -f "$cache/$key/brief"
    case "/$place/" in */../* | *//*) return 0 ;; esac
    (
        cd "$HOME" || exit 0
        while [ "${place#*/}" != "$place" ]; do
            part=${place%%/*} place=${place#*/}
            [ ! -L "$part" ] && cd "./$part" 2>/dev/null || exit 0
        done
        [ -f "./$place" ] && [ ! -L "./$place" ] && [ "$(head -n 1 "./$place")" = "<!-- memory-sidecar brief -->" ] && rm -f "./$place"
    )
    return 0
}
say_ready() { # whether all was kept, how many files there are
    drop_brief
    [ "$key" != ready.json ] || return 0
    ( umask 077; printf '{"outcome":"complete",%s,"sandbox":"%s","conversation":"%s","kept":%s,"read_only":%s,"files":%s,"time":"%s"}\n' \
        "$echo_back" "$(escaped "$sandbox")" "$(escaped "$conversation")" "$1" "$([ -n "$reader" ] && echo true || echo false)$(printf '%s' "$only" | sed 's/^{\(.*\)}$/,\1/')" "$2" "$(date -u +%Y-%m-%dT%H:%M:%SZ 2>/dev/null)" \
        > "$ready.new" ) && mv -f "$ready.new" "$ready"
}
# The snapshots that the memory with this key was restored from and exported to, newest first.
lineage_of() {
    for file in "$cache/$1/read-lineage" "$cache/$1/lineage" "$cache/$1/part-lineage"; do
        if [ -f "$file" ]; then sed -n '/^[0-9A-Za-z-]\{1,64\}$/p' "$file" | tail -n 100 | sed -n '1!G;h;$p'; return; fi
    done
}
withheld="" apart="" left="" seen=""
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root waits=\$waits_$root waiting=\$waiting_$root"
    if [ -n "$waits" ] && [ ! -d "$waits" ]; then
        withheld="$withheld${withheld:+,}$waiting" apart="$apart${apart:+,}\"$name\""
        continue
    fi
    left="$left $root"
    place=$(CDPATH='' cd "$folder" 2>/dev/null && pwd -P) || place=$folder
    case "$seen" in *"|${name%-[0-9]*}:$place|"*) fail roots-collide "Two roots of the snapshot would land in one folder; name each with --project." ;; esac
    seen="$seen|${name%-[0-9]*}:$place|"
done
roots=$left
# Those that were withheld before.
late=$(sed -n 's/.*"withheld": *\[\([^]]*\)\].*/\1/p' "$cache/$key/notes" 2>/dev/null)
# Whose memory is here: this one's, or else the one that was noted last.
owner="" newest="" origin="" there=0
[ -z "$(lineage_of "$key")" ] || owner=$key
if [ -z "$owner" ]; then
    for file in $(cd "$cache" 2>/dev/null && ls -t */read-lineage */lineage */part-lineage 2>/dev/null); do owner=${file%/*}; break; done
fi
for one in $(lineage_of "$key"); do
    case " $stored " in *" $one "*) newest=${newest:-$one} ;; esac
    # What was exported since and did not become the head is in the store beside it.
    case " $heads " in *" $one "*) origin=$one; break ;; esac
done
ahead=yes
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root"
    case "$late" in *"\"$name\""*) ahead=no ;; esac
    count=$( ( [ -d "$folder" ] && cd "$folder" && look select "$root" -print0 ) 2>/dev/null | names | wc -l)
    there=$((there + count))
    [ "$((count))" -gt 0 ] || ahead=no
    eval "needed=\$needed_$root"
    lost=$(printf '%s\n' "$needed" | while IFS= read -r file; do [ -z "$file" ] || [ -e "$folder/$file" ] || printf x; done)
    [ -z "$lost" ] || ahead=no
done
# What changed cannot be told without Python. A sandbox that holds the snapshot is left as it is, unless all of a root is gone,
# or something that the memory cannot do without.
was_reader=""
part_of() { [ -f "$cache/$1/lineage" ] || [ -f "$cache/$1/read-lineage" ] || head -n 1 "$cache/$1/part-lineage" 2>/dev/null; }
was_part=$(part_of "$key") owner_part=$(part_of "$owner")
[ ! -f "$cache/$key/read-lineage" ] && [ -z "$was_part" ] || was_reader=yes
# A part takes the place of nothing else, as that would not be exported any more.
if [ -n "$only" ] && [ -z "$discard" ] && [ -n "$owner" ] && [ "$there" -gt 0 ]; then
    [ "$owner" = "$key" ] && [ "$only" = "$was_part" ] || fail other-part "This sandbox holds more than this part, another part, or another memory: a part cannot take its place, as nothing else would be exported from here any more."
fi
if [ "$mode" = replace ] && [ -z "$discard$saved" ] && [ "$there" -gt 0 ]; then
    if [ -n "$origin" ] && [ "$ahead" = yes ] && [ "$reader" = "$was_reader" ] && [ "$only" = "$was_part" ]; then
        told=""
        [ "$newest" = "$origin" ] || told=",\"warnings\":[\"What was exported from here since then ($newest) is stored beside the head.\"]"
        case " $keep " in *" $origin "*) leave; say_ready true "$there"; answer kept ",\"holds\":\"$origin\",\"files\":$there,\"withheld\":[$withheld]$told"; exit 0 ;; esac
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
( umask 077; mkdir -p "$unpacked" ) || fail disk-full "$unpacked cannot be made."
{ gzip -dc "$bundle" | ( cd "$unpacked" && umask 0 && tar -xpf - ); } 2>"$unpacked/problems" || fail disk-full "The memory could not be unpacked: $(head -n 1 "$unpacked/problems")"
# Names that a list of sums may not carry, or not for every sha256sum, are in a list of their own.
compare_odd() {
    while IFS= read -r line; do
        real "${line#* }"
        [ "$(sha256sum < "$file" | cut -c 1-64)" = "${line%% *}" ] || return 1
    done < ../odd
}
checked=true
if command -v sha256sum >/dev/null 2>&1; then
    (
        cd "$unpacked/new" && compare_odd || exit 1
        [ ! -s ../sums ] || sha256sum -c --quiet ../sums >/dev/null 2>&1 || sha256sum -c ../sums >/dev/null 2>&1
    ) || fail incomplete "Not every file arrived as it was."
else
    checked=false
fi
move() { # move every listed file from $1 to $2, as far as it goes
    while IFS= read -r line; do
        real "$line"
        [ -d "$2/${file%/*}" ] || mkdir -p "$2/${file%/*}" || return 1
        # A move to a folder is one into it.
        [ ! -d "$2/$file" ] && mv "$1/$file" "$2/$file" || return 1
    done
}
aside="$cache/set-aside/$aside_name"
[ ! -L "$cache/set-aside" ] || fail in-the-way "$cache/set-aside is a link; it has to be a folder."
broken() {
    undo && fail swap-failed "$1"
    stages="" # what was there is still in them: the next run tries again
    fail swap-failed "$1 It could not be undone, either: see $swap."
}
# Of the names in a list, those in the part that is restored.
inside() { if [ -f "$unpacked/$name.part" ]; then sed -E -f "$unpacked/$name.part"; else cat; fi; }
total() { sum=0; while read -r size; do sum=$((sum + size)); done; printf '%s' "$sum"; }
# What goes, and what of that is kept: all of it where nothing was saved, else what was written since.
kept=0 kept_bytes=0
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root"
    : > "$unpacked/$name.old"
    : > "$unpacked/$name.kept"
    : > "$unpacked/$name.folders"
    [ -d "$unpacked/new/$name" ] && [ -d "$folder" ] && [ "$mode" = replace ] || continue
    odd=$(cd "$folder" && look select "$root" -path "*$unit*" -print | head -n 1)
    [ -z "$odd" ] || fail in-the-way "$folder/${odd#./} has a character in its name with which it can only be moved where there is a python3."
    ( cd "$folder" && look select "$root" -print0 ) | names | inside > "$unpacked/$name.old" || fail swap-failed "This sandbox cannot tell what is in the part."
    ( cd "$folder" && look folders "$root" ! -path "*$unit*" -print0 ) | names | inside | sort -r > "$unpacked/$name.folders"
    # A database's old log would spoil the new database.
    ( cd "$unpacked/new/$name" && find . -type f -print0 ) | names | while IFS= read -r line; do
        real "$line"
        for tail in -wal -shm -journal; do [ ! -e "$folder/$file$tail" ] || printf '%s\n' "$line$tail"; done
    done >> "$unpacked/$name.old"
    sort -u "$unpacked/$name.old" -o "$unpacked/$name.old"
    [ -z "$discard" ] || continue
    # Where there was only a part of the memory, only that was saved.
    if [ -n "$saved" ] && [ -z "$owner_part" ] && [ -f "$cache/.exported" ]; then
        while IFS= read -r line; do
            real "$line"
            [ -z "$( ( cd "$folder" && find "$file" -newer "$cache/.exported" -print ) 2>/dev/null)" ] || printf '%s\n' "$line"
        done < "$unpacked/$name.old" > "$unpacked/$name.kept"
    else
        cat "$unpacked/$name.old" > "$unpacked/$name.kept"
    fi
    kept=$((kept + $(wc -l < "$unpacked/$name.kept")))
    kept_bytes=$((kept_bytes + $( ( cd "$folder" && while IFS= read -r line; do real "$line"; [ -L "$file" ] || wc -c < "$file"; done ) < "$unpacked/$name.kept" | total)))
done
[ "$kept_bytes" -le "$aside_bytes" ] || fail set-aside-full "What is here and in no snapshot is more than the $aside_bytes bytes that are set aside in a sandbox."
[ "$kept" = 0 ] || ( umask 077 && mkdir -p "$aside" ) || fail swap-failed "$aside cannot be made."
folders=""
displaced=""
if [ "$mode" = replace ] && [ "$owner" != "$key" ] && [ "$there" -gt 0 ]; then displaced=$owner; fi
if [ -n "$only" ]; then history=part-lineage; elif [ -n "$reader" ]; then history=read-lineage; else history=lineage; fi
version=""
[ -z "$(cat "$unpacked"/*.old 2>/dev/null | tr -cd '\037')" ] || version="2 "
{
    printf '%s\n' "$version$unpacked" "$aside" "$key" "$history" "$displaced"
    for root in $roots; do eval "printf '%s %s\\n' \"\$name_$root\" \"\$folder_$root\""; done
} > "$swap.new" && mv -f "$swap.new" "$swap" || fail disk-full "$swap cannot be written."
files=0 skipped="" skips=0
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root yields=\$yields_$root"
    [ -d "$unpacked/new/$name" ] || continue
    mkdir -p "$folder" || broken "$folder cannot be made."
    ( cd "$unpacked/new/$name" && find . ! -type d -print0 ) | names > "$unpacked/$name.new"
    while IFS= read -r line; do
        real "$line"
        spared=$mode
        case " $yields " in *" $file "*) spared=seed ;; esac
        if [ "$spared" = seed ] && there_is "$folder/$file"; then
            skips=$((skips + 1))
            [ "$skips" -gt 200 ] || skipped="$skipped${skipped:+,}{\"path\":\"$name/$(escaped "${file#./}")\",\"reason\":\"already there\"}"
            continue
        fi
        [ -L "$unpacked/new/$name/$file" ] || files=$((files + 1))
        printf '%s\n' "$line"
    done < "$unpacked/$name.new" > "$unpacked/$name.put"
    move "$folder" "$aside/$name" < "$unpacked/$name.kept" || broken "An old file in $folder could not be set aside."
    while IFS= read -r line; do
        real "$line"
        if there_is "$folder/$file"; then printf '%s\n' "$line"; fi
    done < "$unpacked/$name.old" > "$unpacked/$name.gone"
    move "$folder" "$unpacked/old/$name" < "$unpacked/$name.gone" || broken "An old file in $folder could not be moved."
    : > "$unpacked/$name.made"
    : > "$unpacked/$name.modes"
    while IFS= read -r line; do
        real "${line% *}"
        if [ ! -d "$folder/$file" ]; then
            printf '%s\n' "${line% *}" >> "$unpacked/$name.made"
            mkdir -p "$folder/$file" || broken "$folder/$file cannot be made."
        elif [ "$mode" = seed ]; then
            continue
        fi
        printf '%s\n' "$line" >> "$unpacked/$name.modes"
    done < "$unpacked/$name.wanted"
    : > "$unpacked/$name.putting"
    move "$unpacked/new/$name" "$folder" < "$unpacked/$name.put" || broken "A file could not be put into $folder."
    folders="$folders${folders:+,}\"$name\":\"$(escaped "$(cd "$folder" && pwd -P)")\""
done
(
    umask 077
    mkdir -p "$cache/$key" && rm -f "$cache/$key/$history.new" "$cache/$key/notes.new" || exit 1
    printf '%s\n' ${only:+"$only"} "$snapshot" > "$cache/$key/$history.new" && printf '%s,"roots":{%s},"withheld":[%s]}' "$notes" "$folders" "$apart" > "$cache/$key/notes.new"
) || broken "$cache/$key cannot be written to."
mv -f "$swap" "$swap.done" || broken "$swap cannot be renamed."
finish
leave
told=""
if [ "$kept" != 0 ]; then
    told=",\"set_aside\":{\"path\":\"$(escaped "$aside")\",\"files\":$kept,\"bytes\":$kept_bytes}"
    # This one stays, and the newest four of the others, as far as there is room.
    number=1 room=$((aside_bytes - kept_bytes))
    for one in $(ls "$cache/set-aside" | sort -r); do
        [ "$one" != "$aside_name" ] || continue
        number=$((number + 1))
        size=$(find "$cache/set-aside/$one" -type f -exec sh -c 'for file; do wc -c < "$file"; done' sh {} + | total)
        room=$((room - size))
        if [ "$number" -gt 5 ] || [ "$room" -lt 0 ]; then rm -rf "$cache/set-aside/$one"; fi
    done
fi
say_ready false "$files"
answer complete ",\"files\":$files,\"checked\":$checked,\"skipped\":[$skipped],\"skipped_more\":$((skips > 200 ? skips - 200 : 0)),\"withheld\":[$withheld]$told"
