"""The estimate of tokens is above what six real tokenizers count, for whatever a memory may hold, and near it for English."""

from __future__ import annotations

import base64
import json
import random

import pytest

from sidecar.records.briefs.estimate import estimate_tokens
from tests.parts.homes import PROJECT
from tests.parts.tokenizers import LARGE, count_tokens

NOISE = random.Random(7)


def scatter(start: int, end: int, count: int = 500) -> str:
    """Letters from a range of Unicode, in no order."""
    return "".join(filter(str.isprintable, (chr(NOISE.randrange(start, end)) for _ in range(count))))


ENGLISH = {
    "docs": "".join((PROJECT / f"docs/{name}.md").read_text()[:8000] for name in ("first-steps", "why", "security")),
    "notes": "Yesterday the deploy failed because the cache was not cleared. The user prefers short answers, and wants the"
    " payment tests to run before every release. Remember to ask before the schema is changed. " * 4,
}
TEXTS = {
    **ENGLISH,
    "German": "Gestern ist die Auslieferung fehlgeschlagen, weil der Zwischenspeicher nicht geleert wurde. Die Benutzerin"
    " bevorzugt kurze Antworten und möchte die Zahlungstests vor jeder Veröffentlichung ausführen. Größere"
    " Datenbankänderungen müssen vorher abgesprochen werden: Rückfragen gehören ins Übergabeprotokoll. ",
    "French": "Hier, la mise en production a échoué parce que le cache n'avait pas été vidé. L'utilisatrice préfère des"
    " réponses brèves et souhaite que les tests de paiement soient exécutés avant chaque déploiement. ",
    "Italian": "Ieri la distribuzione non è riuscita perché la memoria temporanea non era stata svuotata. L'utente"
    " preferisce risposte brevi e desidera che le prove dei pagamenti vengano eseguite prima di ogni rilascio. ",
    "Polish": "Wczoraj wdrożenie nie powiodło się, ponieważ pamięć podręczna nie została wyczyszczona. Użytkowniczka woli"
    " krótkie odpowiedzi i chce, żeby testy płatności były uruchamiane przed każdym wydaniem. ",
    "Turkish": "Dün dağıtım başarısız oldu, çünkü önbellek temizlenmemişti. Kullanıcı kısa yanıtları tercih ediyor ve her"
    " sürümden önce ödeme testlerinin çalıştırılmasını istiyor. ",
    "Russian": "Вчера развёртывание не удалось, потому что кэш не был очищен. Пользователь предпочитает краткие ответы и"
    " хочет, чтобы тесты платежей запускались перед каждым выпуском. ",
    "Chinese": "昨天部署失败了，因为缓存没有清理。用户喜欢简短的回答，并且希望"
    "在每次发布之前运行支付测试。修改数据库结构之前，请务必先询问。"
    "下一步需要检查日志里的警告信息，记录每次对话的摘要，以便代理在新的环境中能够继续工作。",
    "Japanese": "昨日はキャッシュが削除されていなかったため、デプロイに失敗しま"
    "した。ユーザーは短い回答を好み、リリースの前に必ず決済テストを"
    "実行することを望んでいます。データベースの構造を変更する前に、必ず確認してください。",
    "Korean": "어제는 캐시가 비워지지 않아 배포에 실패했습니다. 사용자는 짧"
    "은 답변을 선호하며 매번 출시하기 전에 결제 테스트를 실행하기를"
    " 원합니다. 데이터베이스 구조를 변경하기 전에 반드시 확인해 주세요.",
    "Arabic": "فشل النشر أمس لأن ذاكرة التخزين المؤقت لم تُفرغ. يفضل المستخدم الإجابات القصيرة ويريد تشغيل اختبارات الدفع.",
    "Hebrew": "הפריסה נכשלה אתמול כי המטמון לא נוקה. המשתמשת מעדיפה תשובות קצרות ורוצה להריץ את בדיקות התשלום.",
    "Hindi": "कल परिनियोजन विफल हो गया क्योंकि कैश साफ नहीं किया गया था। उपयोगकर्ता छोटे उत्तर पसंद करता है।",
    "Thai": "เมื่อวานการปรับใช้ล้มเหลวเพราะแคชไม่ได้ถูกล้าง ผู้ใช้ชอบคำตอบสั้น ๆ",
    "emoji": "🎉🚀👩‍👩‍👧‍👦🇩🇪✅❌⚠️🔥 done 👍🏽 🧪🧵💾📦🗂️🪤🫠🩻🪐 " * 4,
    "Python": (PROJECT / "sidecar/engine/core.py").read_text(),
    "shell": (PROJECT / "sidecar/engine/shell/restore.sh").read_text()[:8000],
    "TOML": (PROJECT / "sidecar/layouts/claude-mem.toml").read_text(),
    "JSON": (PROJECT / "docs/openapi.json").read_text()[:8000],
    "minified": json.dumps(json.loads((PROJECT / "docs/openapi.json").read_text()), separators=(",", ":"))[:8000],
    "script": "!function(e,t){var n=e[t],r=function(){for(var i=0,o=n.length;i<o;i++)if(n[i].x>0)return!0;return!1};"
    "e.q=r,t.$=(a,b)=>a?b&&b.c||{}:void 0}(window,'k');" * 5,
    "base64": base64.b64encode(NOISE.randbytes(3000)).decode(),
    "hex": NOISE.randbytes(2000).hex(),
    "times": "\n".join(f"2026-11-{n % 28 + 1:02}T{n % 24:02}:{n % 60:02}:07.{n:03}Z" for n in range(60)),
    "numbers": "".join(NOISE.choice("0123456789") for _ in range(2000)),
    "table": "\n".join(f"| {n} | {n * n} | ok |" for n in range(200)),
    "log": "\n".join(
        f"INFO [worker-{n}] id={NOISE.randbytes(4).hex()} took {n * 7}ms GET /v1/items?id={n}" for n in range(60)
    ),
    "paths": "\n".join(sorted(str(path.relative_to(PROJECT)) for path in (PROJECT / "sidecar").rglob("*.py"))),
    "headings": "\n".join(f"# h{n}" for n in range(500)),
    "letters": "".join(NOISE.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(2000)),
    "capitals": "".join(NOISE.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(2000)),
    "shouting": "DO NOT DELETE THE PRODUCTION DATABASE BEFORE THE MIGRATION HAS BEEN VERIFIED. " * 5,
    "signs": "".join(NOISE.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") for _ in range(2000)),
    "blanks": " " * 3000,
    "lines": "\n" * 1500,
    "tabs": "\t" * 1500,
    "blank lines": "\n  \n\t \n" * 300,
    "indented": "\n".join(" " * NOISE.randrange(40) + "x" for _ in range(200)),
    "rules": "-" * 900 + "=" * 900 + "#" * 300 + "_" * 500,
    "boxes": "┌──────┬─────┐\n│ a    │ b   │\n└──────┴─────┘\n" * 20,
    "Latin letters": scatter(0xC0, 0x250),
    "Cyrillic letters": scatter(0x410, 0x450),
    "kana": scatter(0x3041, 0x3096),
    "pictures": scatter(0x1F300, 0x1FAFF),
    "accents": "".join("a" + scatter(0x300, 0x36F, 5) for _ in range(100)),
}
RARE = {"Han letters": scatter(0x4E00, 0x9FFF), "Hangul letters": scatter(0xAC00, 0xD7A3), "any": scatter(0x80, 0xD7FF)}


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    """How many tokens each text has, by tokenizer."""
    texts = {**TEXTS, **RARE}
    return dict(zip(texts, count_tokens(list(texts.values())), strict=True))


def test_the_estimate_is_above_every_tokenizer(counts: dict[str, dict[str, int]]) -> None:
    estimates = {name: estimate_tokens(text) for name, text in TEXTS.items()}
    assert [
        (name, found, counts[name]) for name, found in estimates.items() if found < max(counts[name].values())
    ] == []


def test_letters_that_nobody_writes_are_above_those_with_large_vocabularies(counts: dict[str, dict[str, int]]) -> None:
    for name, text in RARE.items():
        assert estimate_tokens(text) >= max(counts[name][tokenizer] for tokenizer in LARGE)


def test_the_estimate_is_near_for_english(counts: dict[str, dict[str, int]]) -> None:
    for name, text in ENGLISH.items():
        counted = counts[name]
        assert estimate_tokens(text) <= 1.3 * max(counted.values())
        assert estimate_tokens(text) <= 1.45 * counted["cl100k"]


@pytest.mark.parametrize("part", ["a", " ", "\n", "é", "的", "🎉", "0", "ab ", "`", "aB3$", "\udc80", "\x00"])
def test_a_long_run_of_anything_is_counted_fast(part: str) -> None:
    assert estimate_tokens(part * (1_000_000 // len(part))) > 0


def test_an_empty_text_has_none() -> None:
    assert estimate_tokens("") == 0
