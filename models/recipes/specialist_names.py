"""Made-up names, patterns, expressions and file contents. Everything is drawn from the given `Random`.

Invented words matter most: they cannot be learnt by heart, so that copying is the only way to be right.
"""

from __future__ import annotations

from random import Random

WORDS = tuple(
    """
    account actual address agenda alarm album alpha amount animal answer apple archive area army arrow artist asset atlas
    audio author autumn avenue backup badge bakery balance ball banana bank banner base basket battery beach bean bear
    beta bicycle bill bird birthday block blog board boat body bonus book border bottle box branch bread brick bridge
    brief bright broken brother brush budget bug build bundle bus button cable cache cake calendar camera camp canvas car
    card carpet case castle cat cell center chain chair chapter chart chat check cheese chef chicken child choice church
    circle city claim class clean client clock cloud club coach coast code coffee coin cold color column comment common
    company config contact content contract cookie copy corn corner cost cotton count country course cover cream crew
    crowd crown cup curve customer daily dance danger dark data date day deal debug deep default delta demo desert design
    desk detail device diary diet dinner doctor dog door draft dragon drama draw dream dress drink driver dust eagle early
    earth east easy edge editor egg elephant email empty energy engine entry error essay event exam example expense export
    extra fabric face factory family farm fast father feature fee field figure film filter final finance fire fish flag
    flight floor flow flower folder food forest form frame free fresh friend frog fruit fuel game garden gate giant gift
    girl glass global goal gold grade grand grass green grid group guest guide guitar hair hall hammer hand handler harbor
    hat head health heart helper hero hill history holiday home honey hook horse hospital hotel house hunter ice idea image
    import inbox index info ink input insect invoice iron island item jacket jazz job joke journal journey juice jungle
    junior kernel key kid king kitchen kite knife label lake lamp land laptop large last law lawyer layer lead leaf lecture
    left lemon lesson letter level library license light lime limit line link lion list lit little loader local lock log
    logo long lunch machine magic mail main manager manual map march market master match meal measure media meeting member
    memo memory menu merge message metal meter method middle milk mind minute mirror mobile model module money monitor
    month moon morning mother motor mountain mouse movie museum music name nation needle net news night noise north note
    notes novel number ocean offer office oil old olive onion opera orange orbit order origin output owl package page paint
    palace paper parcel parent park parser part party pass patch patient payment pencil people pepper phone photo piano
    picture pilot pink pipe pizza place plan planet plant plate player plot pocket poem point police policy pool port post
    potato power press price print private prize process product profile program project public pump purple puzzle quality
    queen query quest queue quick quiet quote rabbit race radio rain random range rate raw reader recipe record red region
    release remote rent report request resource rest result review rice ring river road robot rock role roof room root
    rose route router row rule runner salad salary sale salt sample sand scene schedule school science score screen script
    sea search season seat second secret section secure seed select senior server session setup shadow shape share sheep
    sheet shell ship shirt shoe shop shower signal silver simple singer sister site size skill sky sleep slide small smile
    smoke snake snow soap soccer sofa soft soil song sort soup source south space speech speed spider spoon sport spring
    square stable stack staff stage stamp star start state station status steam step stone stop storage store storm story
    stream street string student studio style sugar suit summary summer sun supply survey sweet swim switch symbol system
    table tail tailor talk tank target task tax tea teacher team temp tennis term test text theme theory thesis ticket
    tiger time title today token tomato tool tooth top total tower town toy track trade traffic trail train travel tree
    trial trip truck tunnel turtle uncle under union unit update upload upper user utils value valley vector vendor version
    video village violin visit voice volume wagon wall warm watch water wave weather web week west wheel white widget wife
    wind window wine winter wire wolf wood word work worker world writer yellow young zebra zero zone
    """.split()
)
SMALL_WORDS = "a an and are as at be but by can do for from has he her his if in is it my no not of on or our she so that the their they this to us was we were will with you".split()
FOREIGN = tuple(
    """
    año niño señal café crème élève forêt hôtel été naïve über schön straße müller größe zürich köln fähre ærø smørrebrød
    ångström malmö håndbok łódź źródło żaba čeština šťastný říjen győr tűz șarpe ağaç ığdır jalapeño coração ação informação
    привет мир отчёт данные файл письмо проверка заметки ελληνικά σημείωση αρχείο 日本 資料 报告 数据 笔记 文件 메모 보고서 שלום
    résumé déjà façade garçon München Größe Ñandú Übung Éclair naïveté fiancé brøl þing Æther œuvre
    """.split()
)
SYMBOLS = ("€", "→", "✓", "😀", "🚀", "°", "µ", "π", "½", "№", "★", "❤")
EXTENSIONS = (
    "txt", "md", "py", "js", "ts", "json", "csv", "log", "html", "css", "c", "h", "cpp", "rs", "go", "java",
    "rb", "sh", "toml", "yaml", "yml", "ini", "cfg", "conf", "xml", "sql",
    "tex", "rst", "tsv", "env", "lock", "bak", "tmp", "old", "dat", "db", "svg", "png", "jpg", "pdf", "doc",
    "docx", "xlsx", "zip", "gz", "tar.gz", "ipynb", "kt", "swift", "php",
    "pl", "lua", "r", "jl", "hs", "scala", "vue", "jsx", "tsx", "scss", "srt", "ics", "eml", "diff", "patch",
    "proto", "onnx", "bin", "mk", "cmake", "gradle", "properties", "out", "err", "po",
)  # fmt: skip
COMMON_EXTENSIONS = ("txt", "md", "py", "json", "csv", "log", "txt", "md", "py", "txt")
PLAIN = (
    "Makefile", "Dockerfile", "README", "LICENSE", "CHANGELOG", "TODO", "NOTES", "AUTHORS", "INSTALL",
    "Gemfile", "Rakefile", "Procfile", "Vagrantfile", "Jenkinsfile", "NEWS", "COPYING", "VERSION",
    ".gitignore", ".env", ".bashrc", ".profile", ".vimrc", ".editorconfig", ".dockerignore", ".npmrc",
    ".gitattributes", "CMakeLists.txt", "__init__.py", "README.md", "package.json",
    "pyproject.toml", "setup.py", "index.html", "main.py", "requirements.txt", "go.mod", "Cargo.toml",
    "tsconfig.json", "CONTRIBUTING.md", "docker-compose.yml", "todo.txt", "notes.txt", "hosts", "passwd",
)  # fmt: skip
FOLDERS = (
    "src", "tests", "docs", "lib", "app", "build", "data", "scripts", "tmp", "etc", "bin", "config", "assets",
    "public", "include", "vendor", "examples", "tools", "home", "images", "static",
    "templates", "utils", "models", "logs", "photos", "music", "Documents", "Downloads", "Desktop", "test",
    "core", "api", "backup", "archive", "reports", "notes", ".github", "node_modules", "dist", "var", "usr",
)  # fmt: skip
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiouaeiouy"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def invented(rng: Random) -> str:
    """A word that nobody has seen: mostly speakable, now and then just letters."""
    kind = rng.random()
    if kind < 0.15:
        return "".join(rng.choices(LETTERS, k=rng.randint(1, 5)))
    text = ""
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))):
        text += rng.choice(CONSONANTS) + rng.choice(VOWELS)
        if chance(rng, 0.35):
            text += rng.choice("nrstlmkdpxbg")
    return rng.choice(VOWELS) + text if kind < 0.3 else text


def foreign(rng: Random) -> str:
    """A word with letters beyond ASCII: a known one, or an invented one with some letters exchanged."""
    if chance(rng, 0.5):
        return rng.choice(FOREIGN)
    letters = list(invented(rng))
    letters[rng.randrange(len(letters))] = rng.choice(
        "áàâäãåæçéèêëíîïñóòôöõøúùûüýßşščžłđğőűабвгдежзиклмноαβγδλπσω日本文字数"
    )
    return "".join(letters)


def word(rng: Random) -> str:
    """One word of a name."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    return invented(rng) if kind < 0.94 else foreign(rng)


def number(rng: Random) -> str:
    """A whole number of one to six digits, short ones more often."""
    return str(rng.randint(0, 10 ** rng.choice((1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6))))


def day(rng: Random) -> str:
    return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 31):02d}"


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def stem(rng: Random) -> str:
    """The name of a file without its extension."""
    kind = rng.random()
    if kind < 0.34:
        text = word(rng)
    elif kind < 0.84:
        words = [word(rng) for _ in range(rng.choice((2, 2, 2, 3)))]
        if chance(rng, 0.2):
            words.insert(
                rng.randrange(len(words) + 1),
                rng.choice((number(rng), day(rng), f"v{rng.randint(1, 20)}", str(rng.randint(1, 9)))),
            )
        style = rng.random()
        if style < 0.2:
            text = words[0] + "".join(part.capitalize() for part in words[1:])
            text = text[:1].upper() + text[1:] if chance(rng, 0.4) else text
        else:
            text = rng.choice("__---.  ").join(words) if style < 0.9 else "".join(words)
    elif kind < 0.94:
        text = (
            word(rng)
            + rng.choice(("", "", "_", "-"))
            + rng.choice((number(rng), day(rng), f"v{rng.randint(1, 9)}.{rng.randint(0, 20)}"))
        )
    else:
        text = rng.choice((number(rng), day(rng), rng.choice(LETTERS), f"~{word(rng)}",
            f"{word(rng)} ({rng.randint(1, 9)})", f"{word(rng)}+{word(rng)}", f"{word(rng)}@{number(rng)}",
            f"-{word(rng)}", f"#{word(rng)}#", f"{word(rng)}'s {word(rng)}", f"{word(rng)}, {word(rng)}",
            f"{word(rng)} & {word(rng)}", f"[{word(rng)}]", f"{word(rng)}={number(rng)}",
            f"_{word(rng)}"))  # fmt: skip
    shape = rng.random()
    return text.upper() if shape < 0.05 else text.capitalize() if shape < 0.15 else text


def file_name(rng: Random) -> str:
    """The last part of a path."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(PLAIN)
    if kind < 0.12:
        return stem(rng)
    if kind < 0.14:
        return "." + word(rng) + rng.choice(("", "rc", "_history"))
    extension = rng.choice(COMMON_EXTENSIONS) if chance(rng, 0.45) else rng.choice(EXTENSIONS)
    if chance(rng, 0.06):
        extension = invented(rng)[:4]
    return f"{stem(rng)}.{extension}"


def folder_name(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(FOLDERS)
    return word(rng) if kind < 0.8 else stem(rng)


def folder(rng: Random) -> str:
    """A folder's path, sometimes with a slash at its end."""
    parts = [folder_name(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3)))]
    return _root(rng) + "/".join(parts) + ("/" if chance(rng, 0.2) else "")


def file_path(rng: Random) -> str:
    """A file's path of up to three folders."""
    parts = [folder_name(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 1, 2, 2, 3)))]
    return _root(rng) + "/".join([*parts, file_name(rng)])


def _root(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.84:
        return ""
    return rng.choice(
        (
            "./",
            "./",
            "../",
            "../",
            "../../",
            "/",
            "/",
            "/etc/",
            "/tmp/",
            "/home/" + word(rng) + "/",
            "~/",
            "~/",
            "/var/log/",
        )
    )


def identifier(rng: Random) -> str:
    words = [word(rng) for _ in range(rng.choice((1, 2, 2)))]
    return rng.choice(
        (
            "_".join(words),
            words[0] + "".join(part.capitalize() for part in words[1:]),
            "".join(part.capitalize() for part in words),
            "_".join(words).upper(),
        )
    )


def pattern(rng: Random) -> str:
    """What one searches for."""
    kind = rng.random()
    if kind < 0.34:
        text = word(rng)
        return text.capitalize() if chance(rng, 0.25) else text
    if kind < 0.42:
        return rng.choice(
            (
                "TODO",
                "FIXME",
                "XXX",
                "HACK",
                "BUG",
                "NOTE",
                "ERROR",
                "WARNING",
                "DEBUG",
                "None",
                "null",
                "true",
                "NaN",
                "main",
                "import",
                "return",
                "def",
                "class",
            )
        )
    if kind < 0.62:
        return identifier(rng)
    if kind < 0.80:
        return phrase(rng, rng.choice((2, 2, 2, 3, 3, 4)))
    if kind < 0.87:
        return rng.choice(
            (
                number(rng),
                day(rng),
                clock(rng),
                f"{number(rng)}.{number(rng)}",
                f"v{rng.randint(1, 9)}.{rng.randint(0, 30)}",
                f"#{number(rng)}",
            )
        )
    name = identifier(rng)
    return rng.choice((f"def {name}", f"class {name}", f"import {name}", f"{name}()", f"{name}(",
        f"{name} = {number(rng)}", f"{name}=", f"{name}:", f"self.{name}", f"{word(rng)}.{name}",
        f"<{word(rng)}>", f"--{word(rng)}", f"${name}", f"@{word(rng)}", f"{word(rng)}@{word(rng)}.com",
        f"{word(rng)}-{word(rng)}", f"// {word(rng)}", f"[{word(rng)}]", f"{word(rng)}'s", f"{name};",
        f"#include <{word(rng)}.h>", f"{word(rng)} -> {word(rng)}", f"{word(rng)}*", f"{number(rng)}%",
        f"{word(rng)}/{word(rng)}", f"return {name}", f"{word(rng)}\\{word(rng)}",
        f'{word(rng)} "{word(rng)}"'))  # fmt: skip


def phrase(rng: Random, count: int) -> str:
    """Some words of a text."""
    words = [rng.choice(SMALL_WORDS) if chance(rng, 0.3) else word(rng) for _ in range(count)]
    return " ".join(words)


def sentence(rng: Random) -> str:
    text = phrase(rng, rng.randint(2, 11))
    if chance(rng, 0.15):
        text = text.replace(" ", ", ", 1)
    if chance(rng, 0.1):
        text += " " + rng.choice((number(rng), day(rng), clock(rng), rng.choice(SYMBOLS)))
    return (text[:1].upper() + text[1:] if chance(rng, 0.75) else text) + rng.choice(
        ("", ".", ".", ".", "!", "?", ":")
    )


def line(rng: Random) -> str:
    """A line as it stands in some file."""
    kind = rng.random()
    if kind < 0.5:
        return sentence(rng)
    name, other = identifier(rng), word(rng)
    return rng.choice((f"- {phrase(rng, rng.randint(1, 4))}",
        f"{rng.randint(1, 12)}. {phrase(rng, rng.randint(1, 5))}", f"* {phrase(rng, 2)}",
        f"[ ] {phrase(rng, 3)}", f"# {phrase(rng, rng.randint(1, 4))}", f"## {word(rng).capitalize()}",
        f"{name} = {number(rng)}", f"{name}: {other}", f"{name}={other}", f'{name} = "{other}"',
        f"{other},{number(rng)},{word(rng)}", f"{other};{number(rng)}", f"import {other}",
        f"from {other} import {name}", f"def {name}({other}):", f"    return {name}",
        f"# {rng.choice(('TODO', 'FIXME'))}: {phrase(rng, 3)}",
        f"{day(rng)} {clock(rng)} {rng.choice(('INFO', 'ERROR', 'WARN'))} {phrase(rng, 3)}",
        f'{{"{other}": {number(rng)}}}', f'{{"{other}": "{word(rng)}"}}', f"<{other}>{word(rng)}</{other}>",
        f"{other}\t{number(rng)}", f"{other} -> {word(rng)}", f"{name}();", f"let {name} = {number(rng)};",
        f"{word(rng)}@{other}.org", f"{number(rng)}", f"{other}", f"$ {other} --{word(rng)}",
        f"{other} {rng.choice(SYMBOLS)}", f"127.0.0.1 {other}",
        f"{other}:x:{number(rng)}:{number(rng)}::/home/{other}:/bin/sh",
        f"C:\\{other}\\{word(rng)}"))  # fmt: skip


def text(rng: Random, lines: int) -> str:
    """The beginning of some file, without a newline at its end."""
    return "\n".join(
        "" if chance(rng, 0.06) and 0 < index < lines - 1 else line(rng) for index in range(lines)
    )


# --- arithmetic -------------------------------------------------------------------------------------


def operand(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.8:
        return number(rng)
    return f"{rng.randint(0, 10 ** rng.randint(1, 3))}.{rng.randint(0, 10 ** rng.randint(1, 3))}"


def expression(rng: Random) -> str:
    """An expression in symbols, spaced one way throughout."""
    space = rng.choice((" ", " ", ""))
    return _sum(rng, space, rng.choice((2, 2, 2, 2, 3, 3, 4)))


def _sum(rng: Random, space: str, count: int) -> str:
    parts = []
    for index in range(count):
        if index:
            parts.append(rng.choice("++++----****////" if chance(rng, 0.95) else "×÷−"))
        if count < 4 and chance(rng, 0.12):
            parts.append(f"({_sum(rng, space, 2)})")
        else:
            parts.append(("-" if chance(rng, 0.04) else "") + operand(rng))
    return space.join(parts)


def spoken(rng: Random) -> tuple[str, str]:
    """(in words, the expression it means): operators spelled out, operands as they are, in their order."""
    a, b, c = operand(rng), operand(rng), operand(rng)
    forms = (
        (f"{a} plus {b}", f"{a} + {b}"), (f"{a} minus {b}", f"{a} - {b}"), (f"{a} times {b}", f"{a} * {b}"),
        (f"{a} divided by {b}", f"{a} / {b}"), (f"{a} multiplied by {b}", f"{a} * {b}"), (f"{a} over {b}",
        f"{a} / {b}"),
        (f"{a} x {b}", f"{a} * {b}"), (f"the sum of {a} and {b}", f"{a} + {b}"),
        (f"the product of {a} and {b}", f"{a} * {b}"), (f"the difference of {a} and {b}", f"{a} - {b}"),
        (f"the quotient of {a} and {b}", f"{a} / {b}"),
        (f"{a} plus {b} plus {c}", f"{a} + {b} + {c}"), (f"{a} plus {b} minus {c}", f"{a} + {b} - {c}"),
        (f"{a} times {b} plus {c}", f"{a} * {b} + {c}"), (f"{a} plus {b}", f"{a} + {b}"), (f"{a} times {b}",
        f"{a} * {b}"), (f"{a} minus {b}", f"{a} - {b}"),
        (f"the sum of {a}, {b} and {c}", f"{a} + {b} + {c}"), (f"the difference between {a} and {b}",
        f"{a} - {b}"), (f"half of {a}", f"{a} / 2"), (f"twice {a}", f"{a} * 2"), (f"{a} squared",
        f"{a} * {a}"), (f"{a}% of {b}", f"{a} / 100 * {b}"), (f"{a} percent of {b}", f"{a} / 100 * {b}"),
    )  # fmt: skip
    return rng.choice(forms)


def order(rng: Random) -> tuple[str, str]:
    """(a whole order such as `add 2 and 3`, the expression it means)."""
    a, b = operand(rng), operand(rng)
    forms = (
        (f"add {a} and {b}", f"{a} + {b}"), (f"add {a} to {b}", f"{b} + {a}"), (f"subtract {a} from {b}",
        f"{b} - {a}"), (f"multiply {a} by {b}", f"{a} * {b}"), (f"multiply {a} and {b}", f"{a} * {b}"),
        (f"divide {a} by {b}", f"{a} / {b}"),
        (f"take {a} from {b}", f"{b} - {a}"), (f"double {a}", f"{a} * 2"), (f"halve {a}", f"{a} / 2"),
        (f"square {a}", f"{a} * {a}"), (f"sum {a} and {b}", f"{a} + {b}"), (f"multiply {a} with {b}",
        f"{a} * {b}"),
    )  # fmt: skip
    return rng.choice(forms)
