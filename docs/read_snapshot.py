"""Read a snapshot without the sidecar: python read_snapshot.py STORE_FOLDER MEMORY OUTPUT_FOLDER [SNAPSHOT]

The standard library of Python 3.8 and, for .zst packs, the zstd program. format.md says why each step is there.
"""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile


def check(holds, complaint):
    if not holds:
        raise ValueError(complaint)


def chunks(place, size=1 << 20):
    with open(place, "rb") as file:
        yield from iter(lambda: file.read(size), b"")


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sealed(place, **expected):
    data = b"".join(chunks(place)).partition(b"\nsigned ")[0]  # in a signed store; the signature is not checked
    value = json.loads(data)
    value.pop("sha256")
    seal = hashlib.sha256(canonical(value)).hexdigest()
    check(data == canonical(dict(value, sha256=seal)) + b"\n", place + " does not match its own sha256")
    check(value["format"] in (1, 3) and expected.items() <= value.items(), f"{place} is not of {expected}")
    return value


def whole(place, size, sha256):
    digest = hashlib.sha256()
    for chunk in chunks(place):
        digest.update(chunk)
    check((os.path.getsize(place), digest.hexdigest()) == (size, sha256), place + " is damaged")
    return place


class Whole:
    def __init__(self, plain):
        self.plain = plain

    def read(self, size):  # tarfile would go on for as long as a header says, also when nothing comes
        data = self.plain.read(size)
        check(data, "a pack ends before it should")
        return data


def lay(pack, lines, entries, output):
    zstd = ["zstd", "-q", "-d", "-c", pack]
    plain = gzip.open(pack) if pack.endswith(".gz") else subprocess.Popen(zstd, stdout=subprocess.PIPE).stdout  # noqa: SIM115
    with plain, tarfile.open(None, "r|", Whole(plain), encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            path = re.sub("^@blocks/", "", member.name)
            if not member.isreg() or entries.get(path, {}).get("type") != "file":  # gone, or another type, by the end
                continue
            line, data = lines[path], tar.extractfile(member)
            runs = line["blocks"] if path != member.name else f"0-{line['size'] // line['block']}"
            os.makedirs(os.path.join(output, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(output, path), "r+b" if path != member.name else "wb") as file:
                for first, _, last in (run.partition("-") for run in runs.split(",")):
                    for number in range(int(first), int(last or first) + 1):
                        file.seek(number * line["block"])
                        file.write(data.read(line["block"]))
                file.truncate(line["size"])


def finish(path, entry, place):
    os.makedirs(place if entry["type"] == "dir" else os.path.dirname(place), exist_ok=True)
    if entry["type"] == "link":
        inside = os.path.normpath(os.path.join(os.path.dirname(path.partition("/")[2]), entry["target"]))
        check(inside.split("/")[0] not in ("", ".."), path + " leads out of its root")
        return os.symlink(entry["target"], place)
    if entry["type"] == "file":
        sums = [hashlib.sha256(data).digest() for data in chunks(place, entry["block"])]
        digest = sums[0] if len(sums) == 1 else hashlib.sha256(b"".join(sum[:16] for sum in sums)).digest()
        check((os.path.getsize(place), digest.hex()) == (entry["size"], entry["digest"]), path + " is damaged")
        os.utime(place, ns=(entry["mtime"], entry["mtime"]))
    return os.chmod(place, entry["mode"])


def read(store, memory, output, snapshot=""):
    readable = re.sub(r"[^a-z0-9._-]+", "-", memory.lower())[:40].strip("-.")
    plain, digest = re.match(r"[a-z0-9][a-z0-9._-]{0,62}\Z", memory), hashlib.sha256(memory.encode()).hexdigest()[:32]
    names = [memory] if plain else [f"_{readable}_{digest}", f"{readable}~{digest}"]
    folders = [os.path.join(store, "memories", name) for name in names]
    folder = next(filter(os.path.isdir, folders), folders[0])
    snapshot = snapshot or sealed(os.path.join(folder, "head.json"), memory=memory)["snapshot"]
    place = os.path.join(folder, "snapshots", snapshot + ".json")
    manifest, entries, packs = sealed(place, memory=memory, snapshot=snapshot), {}, []
    for number, pack in enumerate(manifest["packs"]):
        place = os.path.join(folder, "packs", pack["id"])
        with gzip.open(whole(place + ".index.gz", pack["index_bytes"], pack["index_sha256"])) as index:
            header, *lines = [json.loads(line) for line in index]
        check(header == {"index": 1, "kind": "delta" if number else "full"}, place + " is of another kind")
        for line in lines:
            check(entries.pop(line.get("gone", line.get("path")), None) or "path" in line, f"there is no {line}")
            entries.update({line["path"]: line} if "path" in line else {})
        tar = whole(f"{place}.tar.{pack['codec']}", pack["bytes"], pack["sha256"])
        packs.append((tar, {line["path"]: line for line in lines if "path" in line}))
    tree, roots = hashlib.sha256(), [root["name"] for root in manifest["roots"]]
    for path, entry in sorted(entries.items()):
        root, *rest = path.split("/")
        check(root in roots and rest and not {"", ".", ".."} & set(rest), path + " leads out of its root")
        row = [entry.get("mode", 0), entry.get("size", 0), entry.get("digest", ""), entry.get("target", "")]
        tree.update(canonical([path, entry["type"], *row]) + b"\n")
    check(tree.hexdigest() == manifest["tree"], "the packs do not add up to the snapshot")
    os.makedirs(output + ".partial")
    for tar, lines in packs:
        lay(tar, lines, entries, output + ".partial")
    for path in sorted(entries, reverse=True):  # a folder's mode after what it holds
        finish(path, entries[path], os.path.join(output + ".partial", path))
    os.rename(output + ".partial", output)
    print(f"{snapshot}: {manifest['files']} files in {output}")


if __name__ == "__main__":
    try:
        read(*sys.argv[1:]) if len(sys.argv) in (4, 5) else sys.exit(__doc__)
    except (OSError, ValueError, LookupError, TypeError, EOFError, tarfile.TarError) as problem:
        sys.exit(f"Refused: {problem}")
