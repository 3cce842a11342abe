"""What people ask the demo specialist: templates, and the small language they are written in.

`(a|b|c)` is one of the alternatives, `[a]` is there or not, `{slot}` is filled by the generator. Requests
come in five moods, because prefixes ("could you …", "tell me …", "what is …") go with one mood each:

    do    an order            count the lines of {F}
    ask   a direct question   how many lines does {F} have
    ind   an indirect one     how many lines {F} has
    noun  a noun phrase       number of lines in {F}
    bare  stands as it is     wc -l {path}

Slots: {F} a file, {D} a folder, {G} a folder that is called one, {W} where to search, {Q} what to search
for (each with or without words such as "the file"), {path}, {folder}, {pattern} bare, {E} an expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

Node = Callable[[Random], str]

_TOKEN = re.compile(r"[()\[\]|]|[^()\[\]|]+")


def expand(template: str, rng: Random) -> str:
    """One of the texts that `template` stands for; slots stay as they are."""
    return _compiled(template)(rng)


@cache
def _compiled(template: str) -> Node:
    node, rest = _alternatives(_TOKEN.findall(template))
    if rest:
        raise ValueError(f"unbalanced template: {template}")
    return node


def _alternatives(tokens: Sequence[str]) -> tuple[Node, Sequence[str]]:
    options: list[list[Node]] = [[]]
    while tokens and tokens[0] not in ")]":
        token, tokens = tokens[0], tokens[1:]
        if token == "|":
            options.append([])
        elif token in "([":
            inner, tokens = _alternatives(tokens)
            closing, tokens = tokens[0], tokens[1:]
            options[-1].append(inner if closing == ")" else _optional(inner))
        else:
            options[-1].append(_constant(token))
    choices = [_sequence(parts) for parts in options]
    return (choices[0] if len(choices) == 1 else _choice(choices)), tokens


def _constant(text: str) -> Node:
    return lambda rng: text


def _optional(node: Node) -> Node:
    return lambda rng: node(rng) if rng.random() < 0.5 else ""


def _choice(nodes: Sequence[Node]) -> Node:
    count = len(nodes)
    return lambda rng: nodes[int(rng.random() * count)](rng)


def _sequence(nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    return lambda rng: "".join(node(rng) for node in nodes)


# --- words around a name ---------------------------------------------------------------------------

FILE_WORDS = (
    "{path}", "{path}", "{path}", "{path}", "{path}", "{path}", "the file {path}", "file {path}", "my {path}",
    "the {path} file", "the file (named|called) {path}", "my file {path}", "our {path}", "this file: {path}",
    "the document {path}", "the (text |)file {path}", "the {path}",
)  # fmt: skip
FOLDER_WORDS = (
    "{folder}", "{folder}", "{folder}", "{folder}", "(the |)(folder|directory) {folder}",
    "the {folder} (folder|directory|dir)", "my {folder} (folder|directory)",
    "the (folder|directory) (named|called) {folder}",
    "the subfolder {folder}", "my {folder}",
)  # fmt: skip
CALLED_FOLDER_WORDS = tuple(words for words in FOLDER_WORDS if words != "{folder}" and words != "my {folder}")
PATTERN_WORDS = (
    "{pattern}", "{pattern}", "{pattern}", "{pattern}", "{pattern}", "{pattern}",
    "the (word|text|string) {pattern}",
    "the (phrase|term|name|keyword|expression|words) {pattern}", "(text|string|word) {pattern}",
)  # fmt: skip

# --- moods ------------------------------------------------------------------------------------------

BEFORE_DO = (
    "", "", "", "", "", "please ", "please ", "(can|could|would|will) you [please ]",
    "(could|can) you [quickly |just ]",
    "I (want|need) you to ", "I'd like you to ", "I would like you to ", "go [ahead ]and ", "just ",
    "quickly ",
    "let's ", "(now|next|first|then)[,] ", "help me: ", "kindly ", "you should ", "I want to ", "I need to ",
    "would you mind: ", "try to ", "your (task|job): ", "ok[ay], ", "be so kind and ", "do me a favour and ",
    "it's time to ", "may I ask you to ", "mind if you ", "(hi|hello|hey)[ there], [please ]",
    "(can|could) we ", "I was told to ", "use your tools to ", "use a tool to ",
)  # fmt: skip
BEFORE_ASK = (
    "", "", "", "", "", "", "", "(hi|hello|hey)[ there](,|!) ", "[a ]quick question: ", "question: ",
    "so[,] ", "and ",
    "(now|next)[,] ", "ok[ay], ", "well, ", "excuse me, ", "say, ", "please: ", "sorry, ", "one more thing: ",
    "just curious: ", "remind me: ", "tell me: ", "(um|hm|er), ",
)  # fmt: skip
BEFORE_IND = (
    "[please ]tell me ", "(can|could|would|will) you [please ](tell me|say|find out|check|let me know) ",
    "(can|could) you (tell|show) me ", "I (want|need|would like|wish) to know ", "I'd (like|love) to know ",
    "do you (know|happen to know) ", "[please ](find out|check|work out|figure out|look up) ", "I wonder ",
    "[please ]let me know ", "[please ]show me ", "any idea ", "I (forgot|forget|can't remember|don't know) ",
    "I was wondering ", "I have to know ", "help me find out ", "I need to find out ", "I'm curious ", "say ",
    "we need to know ", "it would help to know ", "please report ", "are you able to tell me ",
    "I am asking ",
)  # fmt: skip
BEFORE_NOUN = (
    "the ", "", "what is the ", "what's the ", "what is the ", "give me the ", "tell me the ",
    "[please ]show me the ",
    "I need the ", "I want the ", "get [me ]the ", "(can|could|may) I (have|get|see) the ", "find [me ]the ",
    "[please ]report the ", "check the ", "(can|could) you (give|tell|get|fetch) me the ",
    "do you (have|know) the ",
    "I'd like [to (see|know|have)] the ", "let me (have|see|know) the ", "look up the ", "just the ",
    "fetch the ",
    "determine the ", "I am after the ", "I'm looking for the ", "what would be the ", "might I know the ",
    "print the ",
)  # fmt: skip
ENDINGS = {
    "do": ("", "", ".", ".", ".", "!", " please", " please.", ", please", ", please.", " for me", " for me.",
    " now",
           " now.", ", thanks", ", thanks!", ", thank you.", ", ok?", " (if you can|when you can).",
           " right away."),
    "ask": ("?", "?", "?", "?", "?", "?", "", "", " right now?", " now?", ", please?",
            "??", " please?", ", do you know?", " then?", ", by the way?", " please"),
    "ind": ("", ".", ".", ".", "?", "?", ", please", ", please.", " please", ". Thanks!", ", thanks", "!"),
    "noun": ("", "", ".", ".", "?", "?", ", please", ", please.", " please", "?", ". Thank you!", ", thanks"),
    "bare": ("", "", "", "", "?", ".", " please"),
}  # fmt: skip

LEAD_INS = (
    "I'm (cleaning|tidying) up my (disk|computer|laptop|desk|project).",
    "My (boss|teacher|friend|colleague|editor|sister) (asked|is asking|wants to know).",
    "I'm (writing|preparing|finishing) (a report|my thesis|the release|an essay|a talk).",
    "I (lost|forgot) my notes.",
    "We have a (meeting|deadline|review) (soon|today|tomorrow).", "(Hello|Hi|Hey|Good morning|Good evening)!",
    "I have a question.",
    "I need (your|some) help.", "One (quick|small|short|simple) (question|thing|request).",
    "This is (urgent|important|easy).", "(Okay|Ok|Right|Good|Fine|Great).",
    "Sorry to (bother|disturb) you.", "I am new here.", "Here is a (task|job|question) for you.",
    "I can't find it myself.",
    "My screen is (tiny|small|broken).", "The build (failed|broke) again.",
    "Something (looks|seems) (odd|wrong|strange).",
    "(Thanks|Thank you) (for that|so far).", "I don't remember.", "It's been a (while|long day).",
    "I'm in a hurry.",
    "Before I (send|delete|print|submit) it, I want to be sure.",
    "I (just|only) want to (check|be sure|verify).", "Next task.", "Let's go on.",
    "I am on the train and cannot look.", "A customer called.",
    "We need this for the (audit|invoice|archive|website).", "Nice work.",
)  # fmt: skip
TRAILERS = (
    "I need it for (a report|my boss|the meeting|a form|later).", "(Thanks|Thank you)[ in advance][ a lot]!",
    "(Thanks|Cheers).", "Be (brief|quick|precise|exact).",
    "It's (urgent|important).", "Take your time.", "That's all.", "I'll wait.", "Nothing else.",
    "Only that, please.", "Please hurry.",
    "I think it is (a lot|not much|too much|small|long).", "Just the answer.", "I have no idea.",
    "Then we are done.", "Sorry for the trouble.",
    "No rush.", "Then I can go home.", "You're the best.", "I would be grateful.",
)  # fmt: skip
# What names the thing first, so that the request can say "it"; {F} or {D}.
MENTIONS = (
    "There is a file [called |named ]{path}. ", "I have a file [called |named ]{path}. ", "Look at {path}: ",
    "Take {path}. ",
    "I'm (working on|editing|reading|looking at|about to send|thinking about) {F}. ", "This is about {F}. ",
    "About {F}: ",
    "Do you see {F}? ", "You know {F}. ", "(My|A) colleague sent me {path}. ", "I found {F}. ",
    "Consider {F}. ",
    "In my folder lies {path}. ",
    "I (saved|wrote|made|downloaded) {F} (yesterday|today|last week|long ago). ", "For {F}: ",
    "Let's talk about {F}. ", "Open question about {F}: ", "We use {path} (a lot|every day|here). ",
    "{path} is (mine|important|new|old|odd). ",
    "Someone changed {path}. ", "I need {F}. ", "Remember {path}? ", "Regarding {F}, ", "As for {F}, ",
    "With {F}: ",
)  # fmt: skip
OTHER_FIRST = (
    "I already (checked|did|saw|know) {other}. Now ", "Not {other} this time: ", "Forget {other}. ",
    "I know about {other}. But ",
    "Leave {other} alone; ", "{other} is done. Next, ", "Instead of {other}, ", "Never mind {other}, ",
)  # fmt: skip

Moods = dict[str, tuple[str, ...]]

REQUESTS: dict[str, Moods] = {
    "count_lines": {
        "do": (
            "count [up ](the|all|all the|) lines (in|of|inside) {F}",
            "(do|run|make) a line count (of|on|for) {F}",
            "(get|find|determine|check|report|compute|calculate|give me|tell me|print) the (line count|number of lines|total lines) (of|in|for) {F}",
            "(count|tally|total) how many lines {F} has",
            "count the (rows|text lines|lines of text) (in|of) {F}", "see how many lines {F} (has|contains)",
            "measure the length of {F} in lines", "tell me how many lines (are in|there are in) {F}",
            "count {F} by lines", "count {F}'s lines",
        ),
        "ask": (
            "how many lines (are|are there) (in|inside) {F}",
            "how many lines does {F} (have|contain|hold|span|include|consist of)",
            "how many (lines|text lines|lines of text|rows|rows of text|lines of code) (are in|are there in) {F}",
            "how many lines long is {F}",
            "how long is {F} in lines",
            "what is the (line count|number of lines|total number of lines) (of|in|for) {F}",
            "{F} has how many lines",
            "what is {F}'s line count", "how many lines of (text|code) does {F} (have|contain)",
            "in lines, how long is {F}",
            "how many lines can I find in {F}", "how many lines make up {F}",
            "of how many lines does {F} consist", "how many lines did (I|we|they) write in {F}",
        ),
        "ind": (
            "how many lines (there are|are) in {F}",
            "how many lines {F} (has|contains|holds|spans|consists of)", "how many lines long {F} is",
            "how long {F} is in lines",
            "how many (lines of text|rows|text lines|lines of code) {F} (has|contains)",
            "how many lines make up {F}",
        ),
        "noun": (
            "(line count|number of lines|total number of lines|amount of lines|count of lines|lines count) (of|in|for) {F}",
            "(length|size) of {F} in lines", "line count for {F}", "lines total (of|in) {F}",
        ),
        "bare": (
            "lines in {F}", "{path}: (how many lines|line count|lines|number of lines)", "wc -l {path}",
            "(line count|count lines|lines) {path}",
            "{path} (lines|line count)", "number of lines {path}", "{path} - how many lines",
            "how many lines {path}", "how many lines in {F}",
        ),
    },
    "count_words": {
        "do": (
            "count [up ](the|all|all the|) words (in|of|inside) {F}",
            "(do|run|make) a word count (of|on|for) {F}",
            "(get|find|determine|check|report|compute|calculate|give me|tell me|print) the (word count|number of words|total words) (of|in|for) {F}",
            "(count|tally|total) how many words {F} has", "see how many words {F} (has|contains)",
            "count the (single |written |)words (in|of) {F}",
            "measure the length of {F} in words", "tell me how many words (are in|there are in) {F}",
            "count {F} by words", "count {F}'s words",
        ),
        "ask": (
            "how many words (are|are there) (in|inside) {F}",
            "how many words does {F} (have|contain|hold|include|consist of)",
            "how many words long is {F}", "how long is {F} in words",
            "what is the (word count|number of words|total number of words) (of|in|for) {F}",
            "{F} has how many words", "what is {F}'s word count", "how wordy is {F}",
            "in words, how long is {F}", "how many words can I find in {F}",
            "how many words make up {F}", "of how many words does {F} consist",
            "how many words did (I|we|they) write in {F}",
        ),
        "ind": (
            "how many words (there are|are) in {F}", "how many words {F} (has|contains|holds|consists of)",
            "how many words long {F} is",
            "how long {F} is in words", "how many words make up {F}", "how wordy {F} is",
        ),
        "noun": (
            "(word count|number of words|total number of words|amount of words|count of words|words count) (of|in|for) {F}",
            "(length|size) of {F} in words", "word count for {F}", "words total (of|in) {F}",
        ),
        "bare": (
            "words in {F}", "{path}: (how many words|word count|words|number of words)", "wc -w {path}",
            "(word count|count words|words) {path}",
            "{path} (words|word count)", "number of words {path}", "{path} - how many words",
            "how many words {path}", "how many words in {F}",
        ),
    },
    "file_size": {
        "do": (
            "(get|find|determine|check|report|look up|give me|tell me|print|show [me]) the (size|file size|size in bytes|byte count|number of bytes) of {F}",
            "measure (the size of |){F}", "(count|tell me) the bytes (of|in) {F}",
            "see how (big|large) {F} is", "check how (big|large|heavy) {F} is",
            "tell me how (big|large) {F} is", "weigh {F}", "check {F}'s size", "count how many bytes {F} has",
        ),
        "ask": (
            "how (big|large|heavy) is {F}", "how (big|large) is {F}",
            "what is the (size|file size|size in bytes|byte size) of {F}", "what size (is|has) {F}",
            "what size does {F} have",
            "how many bytes (does {F} (have|take|take up|occupy|use|contain)|is {F}|are in {F}|are there in {F})",
            "how much (space|disk space|storage|room|memory) does {F} (take|take up|use|need|occupy)",
            "is {F} (big|large|small|a big file)",
            "what is {F}'s size", "how (big|large) in bytes is {F}", "how many bytes long is {F}",
            "what does {F} weigh", "how small is {F}", "how much data is in {F}",
            "how (big|large) did {F} get", "how many kilobytes is {F}",
        ),
        "ind": (
            "how (big|large|heavy) {F} is", "how many bytes {F} (has|takes|takes up|occupies|uses|contains)",
            "how many bytes are in {F}",
            "how much (space|disk space|room|storage) {F} (takes|takes up|uses|needs|occupies)",
            "what size {F} (is|has)", "how many bytes long {F} is",
        ),
        "noun": (
            "(size|file size|size in bytes|byte size|byte count|exact size|disk usage|weight) of {F}",
            "number of bytes (of|in) {F}", "bytes of {F}",
            "(space|disk space) (used|taken) by {F}",
        ),
        "bare": (
            "size of {F}", "{path}: (size|how big|bytes|how large|file size)", "wc -c {path}",
            "(size|file size|bytes) {path}", "{path} size",
            "du {path}", "du -b {path}", "how big {path}", "{path} - how big", "bytes in {F}",
        ),
    },
    "file_date": {
        "do": (
            "(get|find|determine|check|report|look up|give me|tell me|print|show [me]) the (date|modification date|change date|modification time|timestamp|last change|last modification) of {F}",
            "(check|see|find out|tell me|say) when {F} was [last ](changed|modified|edited|updated|saved|written)",
            "(check|see|tell me) how (old|recent|fresh) {F} is",
            "date {F}", "check {F}'s date", "find the (day|time) {F} was last changed",
        ),
        "ask": (
            "when was {F} [last ](changed|modified|edited|updated|touched|written|saved|altered|revised)",
            "when was {F} last (changed|modified|edited|updated)",
            "when did (I|we|someone|anyone|somebody|they|he|she) last (change|edit|modify|update|save|touch|work on|write to) {F}",
            "when did {F} last change",
            "when did {F} change [last]",
            "what is the (date|modification date|modification time|timestamp|last change|change date|date and time|mtime|age) of {F}",
            "how (old|recent|fresh|current) is {F}", "what date does {F} (have|carry)",
            "(on what|on which|what|which) (day|date) was {F} [last ](changed|modified|edited|saved)",
            "how long ago was {F} (changed|modified|edited|saved)",
            "at what time was {F} [last ](changed|modified|saved)",
            "when was the last (change|edit|update|modification) (of|to|in) {F}",
            "is {F} (old|recent|new|up to date)",
            "what is {F}'s (date|modification date|timestamp)", "from when is {F}",
            "since when is {F} unchanged",
        ),
        "ind": (
            "when {F} was [last ](changed|modified|edited|updated|touched|written|saved|altered)",
            "when (I|we|someone|they) last (changed|edited|modified|saved) {F}",
            "how (old|recent) {F} is", "when {F} last changed",
            "(on which|what) (day|date) {F} was [last ](changed|saved)",
            "when the last (change|edit) (of|to) {F} was",
        ),
        "noun": (
            "(date|modification date|modification time|change date|timestamp|last change|last modification|date of the last change|time of the last edit|last edit|last update|age|mtime) of {F}",
            "last modified date of {F}", "(day|date) {F} was last (changed|edited)",
            "last change (date|time) of {F}",
        ),
        "bare": (
            "date of {F}", "{path}: (date|last change|when changed|last modified|last edited)", "stat {path}",
            "(date|last change|mtime|last modified|age) {path}",
            "{path} (date|last modified|last change)", "when {path} changed", "last change of {F}",
            "{path} - when was it changed",
        ),
    },
    "read_file": {
        "do": (
            "(read|show|open|display|print|view|output|dump|quote|present) {F}", "(read|open) {F}",
            "(read|show) [me ]{F}",
            "(read|show|display|print|view|output|give|get|quote) [me ]the (contents|content|text|words|whole text|beginning) of {F}",
            "(take|have) a look (at|in|into|inside) {F}", "look (inside|into) {F}",
            "read {F} (to me|out|aloud|out loud|for me|first)",
            "open {F} and (show|tell) me (what it says|what is in it|the contents|what you find)",
            "show me what is (in|inside|written in) {F}",
            "show [me ]what {F} (says|contains)", "cat {F}", "print out {F}", "tell me what {F} says",
            "tell me what (is|stands) in {F}", "read what is in {F}",
            "get me the text (in|inside|of) {F}", "let me (see|read) {F}", "load {F}", "see what {F} says",
            "summarise {F}",
        ),
        "ask": (
            "what (does|did) {F} (say|contain|tell us|tell me|read|look like)", "what does {F} (say|contain)",
            "what is (in|inside|written in|stored in) {F}", "what's (in|inside|written in) {F}",
            "what are the (contents|words) of {F}", "what (text|information|data) is in {F}",
            "what is the (content|text) of {F}", "what stands in {F}",
            "what (do|did) (I|we|they) (write|have|put|note) in {F}", "what can I read in {F}",
            "what have (I|we) written in {F}", "what is {F} about", "what's {F} say",
            "what is the text (in|inside) {F}", "how does {F} (read|begin|start)", "what is there in {F}",
        ),
        "ind": (
            "what {F} (says|contains|reads|is about|looks like)",
            "what is (in|inside|written in|stored in) {F}", "what's in {F}",
            "what (stands|is written) in {F}",
            "what (I|we|they) (wrote|put|noted) in {F}", "how {F} (begins|starts|reads)",
            "what the (contents|content) of {F} (is|are)",
        ),
        "noun": (
            "(contents|content|text|full text|whole text|beginning|words|first lines) of {F}",
            "text (in|inside|from) {F}", "content(s|) (in|from) {F}",
        ),
        "bare": (
            "cat {path}", "{path} (contents|content|text)",
            "{path}: (contents|read|what does it say|show|text)", "head {path}", "type {path}", "less {path}",
            "more {path}",
            "contents of {F}", "read: {path}", "read {path}", "show {path}", "open {path}",
        ),
    },
    "list_files": {
        "do": (
            "(list|show|display|print|enumerate|give|name) [me ](all |the |all the |all of the |)(files|entries|contents|content|items|documents) (in|of|inside|within) {D}",
            "list (files|all files|the files|everything) (in|inside|under|of) {D}", "list {D}", "list {G}",
            "list what is (in|inside) {D}", "(look|peek|have a look|take a look) (into|inside|in) {G}",
            "show [me ]{G}", "show me (what is|what's|everything|all) in {D}",
            "tell me (which files are|what is) in {G}",
            "list [me ]the (contents|files|entries) of {D}", "see (what is|which files are) in {D}",
            "check (which files are|what is) in {G}",
            "do a listing of {D}", "make a list of [the |all ](files|entries) in {D}", "open {G}",
            "get [me ]a (list|listing) of [the ](files|contents) (in|of) {D}", "name the files in {D}",
            "find all files in {D}", "read {G}", "walk through {G}",
        ),
        "ask": (
            "what (files|documents|items|things) (are|are there|do we have|do I have|exist|can be found|can I find) (in|inside|under) {D}",
            "which files (are|are there|exist|lie|live) (in|inside|under) {D}",
            "what is (in|inside) {G}", "what's (in|inside) {G}", "what does {G} (contain|hold|have)",
            "what do (I|we) have in {G}", "which files does {D} (contain|hold|have)",
            "is there anything in {G}", "what (lies|lives|is stored|is kept) in {G}",
            "what are the (files|contents) (in|of) {D}", "what can I find in {G}",
            "which (documents|entries) are in {D}",
            "what files does {D} (have|contain|hold)", "is {G} empty", "what all is in {G}",
            "which files did (I|we) put in {D}", "what did (I|we) (put|store|save) in {G}",
            "what names are in {D}",
        ),
        "ind": (
            "(what|which) files (are|there are) in {D}", "what is (in|inside) {G}", "what's in {G}",
            "what {G} (contains|holds)", "which files {D} (has|contains|holds)",
            "what (I|we) have in {G}", "what (lies|is stored) in {G}", "whether {G} is empty",
            "what there is in {G}",
        ),
        "noun": (
            "(files|contents|content|entries|items|documents) (in|of|inside) {D}",
            "(list|listing) of [the ]files in {D}", "file (list|names) (of|in) {D}",
            "directory listing of {D}",
            "names of (the |all |)files in {D}",
        ),
        "bare": (
            "ls {folder}", "dir {folder}", "(files|contents) (in|of) {D}",
            "{folder}: (files|list|contents|which files|listing)", "list {folder}", "ls -l {folder}",
            "{folder} (listing|contents|files)",
            "what's in {G}", "folder {folder}",
        ),
    },
    "search_text": {
        "do": (
            "(search|grep|scan|check|search through|look through|go through|comb through|examine) {W} for {Q}",
            "(search|look|grep|hunt|check|scan) for {Q} (in|inside|within|throughout|across) {W}",
            "search (in |through |)(all of |){W} for {Q}",
            "(find|locate|spot|show|list|show me|find me|get me|look up) (all |every |any |the |)(occurrences|mentions|instances|uses|places|matches) of {Q} (in|inside) {W}",
            "(find|locate|spot|seek|grep) {Q} (in|inside|within) {W}",
            "(see|check|find out|tell me|test) (if|whether) {Q} (appears|occurs|shows up|comes up|exists|is mentioned|is used|is) (somewhere |anywhere |)in {W}",
            "(see|find|find out|tell me|show me) where {Q} (appears|occurs|shows up|comes up|is used|is mentioned|stands|is defined) in {W}",
            "(see|check|tell me) (if|whether) {W} (contains|mentions|has|includes|uses) {Q}",
            "(find|show me|list|give me|print) [all |the ]lines (with|containing|that contain|that mention|mentioning) {Q} (in|from|of) {W}",
            "(find|list|show me) (the |all |)files (in|under) {W} (with|containing|that contain|that mention) {Q}",
            "(look|search|check) (in|inside|into) {W} for {Q}",
            "in {W}, (find|search for|look for|locate) {Q}", "(do|run) a search for {Q} in {W}",
            "count [the |all ](matches|occurrences|mentions) of {Q} in {W}",
        ),
        "ask": (
            "where (is {Q}|does {Q} (appear|occur|show up|come up|stand)) in {W}",
            "where in {W} (is {Q}|does {Q} (appear|occur|show up|stand))",
            "does {W} (contain|mention|include|have|use|say|talk about) {Q}",
            "is {Q} (mentioned|used|found|present|somewhere|anywhere|written|defined) in {W}",
            "is there (any mention of|a mention of|any trace of|a line with|something like|any) {Q} in {W}",
            "(which|what) lines (of|in) {W} (contain|mention|have|include|use) {Q}",
            "how (often|many times) (does {Q} (appear|occur|show up|come up)|is {Q} (used|mentioned)) in {W}",
            "(which|what) files (in|under) {W} (contain|mention|have|use) {Q}",
            "can you (find|see|spot|locate) {Q} (in|inside|anywhere in) {W}",
            "on (which|what) line (of|in) {W} (is|do I find|do we find) {Q}",
            "does {Q} (appear|occur|show up|exist|come up) (anywhere |somewhere |)in {W}",
            "where do (I|we) (use|mention|have|define|talk about) {Q} in {W}",
            "how many (matches|hits|occurrences|mentions) (of|for) {Q} are (there |)in {W}",
            "has {W} got {Q}", "did (I|we|they) (mention|write|use) {Q} in {W}", "is there {Q} in {W}",
            "who (uses|mentions) {Q} in {W}",
        ),
        "ind": (
            "where {Q} (is|appears|occurs|shows up|is used|is mentioned|stands|is defined) in {W}",
            "(if|whether) {Q} (is|appears|occurs|shows up|is used|is mentioned) in {W}",
            "(if|whether) {W} (contains|mentions|includes|has|uses) {Q}",
            "how (often|many times) {Q} (appears|occurs|is used|is mentioned|comes up) in {W}",
            "which (lines|files) in {W} (contain|mention|have) {Q}",
            "where in {W} {Q} (is|appears|stands|occurs)", "on which line of {W} {Q} (is|appears|stands)",
            "how many (matches|hits) for {Q} (there are|are) in {W}",
        ),
        "noun": (
            "(occurrences|mentions|uses|matches|places|position|location|instances) of {Q} in {W}",
            "lines (with|containing|mentioning) {Q} in {W}",
            "(line|place|spot) where {Q} (is|appears|stands) in {W}",
            "number of (matches|times|hits) (of|for) {Q} in {W}", "search results for {Q} in {W}",
            "first (occurrence|mention|match) of {Q} in {W}",
        ),
        "bare": (
            "grep {pattern} {path}", "grep -n {pattern} {path}", "grep -r {pattern} {path}",
            "{pattern} in {W}", "find {pattern} in {path}", "search {path} for {pattern}",
            "search {path}: {pattern}", "{path}: (find|search|where is|search for) {pattern}",
            "grep -F {pattern} {path}", "search for {pattern} in {path}", "look for {pattern} in {path}",
            "where is {pattern} in {path}",
        ),
    },
    "calculate": {
        "do": (
            "(calculate|compute|evaluate|work out|solve|figure out|determine|do|add up|crunch) {E}",
            "(calculate|compute|evaluate|work out) {E}",
            "(calculate|compute|find|get|give me|tell me) the (result|value|answer|outcome) of {E}",
            "(calculate|compute|solve) (this|the following)( expression| problem| sum|): {E}",
            "do the (math|maths|sum|arithmetic)[ for me]: {E}", "tell me what {E} (is|makes|gives|equals)",
            "(use|take) (a|the|your) calculator: {E}",
            "help me with {E}", "run the numbers: {E}", "check what {E} (is|gives)",
        ),
        "ask": (
            "what is {E}", "what's {E}", "how much is {E}", "what is {E}", "how much is {E}",
            "what does {E} (give|equal|make|come to|evaluate to|yield|amount to|add up to)",
            "what do (you|I|we) get (for|from|if I do) {E}",
            "what is the (result|value|answer|outcome) of {E}",
            "what would {E} (be|give|make)", "how much (does|would) {E} (make|give|come to)",
            "{E} is how much", "{E} is what", "{E} makes what", "what number is {E}", "can you calculate {E}",
            "what are {E}",
        ),
        "ind": ("what {E} (is|gives|makes|equals|comes to)", "how much {E} (is|makes|gives)",
        "what (you|I|we) get for {E}", "what the (result|value) of {E} is"),
        "noun": ("(result|value|answer|outcome|solution) (of|for|to) {E}",),
        "bare": ("{E}", "{E}", "{E} = ?", "{E} =", "{E}=", "{E}=?", "calc {E}", "calc: {E}", "math: {E}",
        "compute: {E}", "calculate {E}", "{E} equals", "= {E}", "calculate: {E}", "{E}, what is it"),
    },
    "current_time": {
        "do": (
            "(tell|give|show) me the (current |exact |present |)(time|date|time and date|date and time|day)",
            "(tell|say|show) the time", "check the (clock|time|date|calendar)",
            "look at the (clock|calendar)", "print the (current |)(date|time)",
            "read the clock", "say (what|which) (time|day) it is", "tell me what (time|day|date) it is",
        ),
        "ask": (
            "what time is it", "what's the time", "what (day|date) is it[ today]",
            "what is (today's|the current|the) date", "what's (today's|the current|the) (date|day)",
            "what is the (current|exact|present|local) (time|date)",
            "which (day|date) (is it|is today|do we have)",
            "what (day|date) is today", "what day of the (month|year) is it", "do you have the time",
            "do you know (what time it is|the time|the date|today's date|what day it is)",
            "what time do (you|we) have", "what (year|month|hour) is it", "how late is it",
            "is it late[ already]", "what is the time( now| right now| at the moment|)",
            "what is the date[ today]", "what does the clock say", "can I have the (time|date)",
            "what is today",
            "is it (morning|noon|evening|midnight|afternoon|monday|friday) (yet|already|now)",
        ),
        "ind": ("what time it is", "what (day|date) it is[ today]", "what (day|date) we have",
        "what the (date|time) is", "how late it is", "what year it is", "the time", "today's date"),
        "noun": ("(current|exact|present|local) (time|date|date and time)", "time", "date", "time and date",
        "date and time", "time of day", "date of today", "day"),
        "bare": ("time", "date", "now", "today's date", "current time", "the time", "date and time", "today",
        "clock", "time now", "what time", "current date", "time check"),
    },
}  # fmt: skip

# The current folder, where no name is in the request.
HERE: dict[str, Moods] = {
    "list_files": {
        "do": (
            "(list|show me|name|display|print) ((all |the |all the |my |)files|everything|all|what is|what's) (here|in this folder|in the current (folder|directory)|in the working directory|in this directory|around here)",
            "list (the current|this) (folder|directory)",
            "list (the |all |my |)files", "look around", "show me (the current|this) (folder|directory)",
            "see what is here", "look around here", "list the folder (we are in|I am in|you are in)",
        ),
        "ask": (
            "(what|which) files (are|do (I|we) have|are there|can you see|lie) (here|in this folder|in this directory|in the current (folder|directory))",
            "what is (here|in this folder|in the current (folder|directory)|in this directory|in the working directory)",
            "what do (we|I) have here", "what's (here|in this folder|in here|around here)",
            "what (files|documents) do (I|we|you) have", "which files (are there|exist|can you see)",
            "what can you see here", "what files are there", "is there anything here", "is this folder empty",
            "what does this folder (contain|hold)",
        ),
        "ind": ("(what is|which files are) here", "what is in (this|the current) (folder|directory)",
        "which files (I|we) have here", "what this folder (contains|holds)"),
        "noun": ("files (here|in this folder|in this directory|in the current (folder|directory))",
        "contents of (this|the current) (folder|directory)", "list of files here"),
        "bare": ("ls", "dir", "ls .", "list", "files here", "list files", "files", "list here",
        "this folder"),
    },
    "search_text": {
        "do": (
            "(search|look|grep|hunt) for {Q} (here|in this folder|in (all|my|the) files|everywhere|in this (project|directory)|in the current (folder|directory)|in all files here)",
            "(search|grep) (here|this folder|this project|everything|all files|the current folder|my files|this directory) for {Q}",
            "find {Q} (here|in this folder|in the current (folder|directory)|in my files|somewhere here)",
            "find (all |the |)files (here |)(containing|that contain|with|that mention) {Q}",
            "(see|check|tell me) (if|where) {Q} (is used|appears|is mentioned) (here|in this (folder|project)|in any file)",
        ),
        "ask": (
            "which (files|file) (here |)(contain|contains|mention|mentions|has|have|use) {Q}",
            "where is {Q} (used|mentioned|defined|written)( here| in this project| in this folder|)",
            "does any file (here |)(contain|mention|have) {Q}",
            "is {Q} (mentioned|used|found) (here|anywhere|in any file|somewhere|in this folder)",
            "where (do|did) (I|we) (use|mention|write|define) {Q}",
            "where does {Q} (appear|occur|come up)( here|)", "in which file (is|do I find|did I write) {Q}",
            "who mentions {Q}",
        ),
        "ind": ("which file (here |)(contains|mentions) {Q}", "where {Q} is (used|mentioned|defined)( here|)",
        "in which file {Q} (is|stands|appears)", "(if|whether) {Q} is (mentioned|used) (here|anywhere)"),
        "noun": ("files (here |)(containing|with|that mention) {Q}",
        "(occurrences|mentions|uses) of {Q} (here|in this folder|in all files)"),
        "bare": ("grep {pattern}", "grep -r {pattern} .", "search {pattern}", "find {pattern} here",
        "search for {pattern}", "grep {pattern} ."),
    },
}  # fmt: skip

# A second request about the file of the exchange before; {F} will be "it".
FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "count_lines": ("and (the |its |)(lines|line count|number of lines)", "and how many lines[ does it have]",
    "and in lines", "lines too", "now its lines"),
    "count_words": ("and (the |its |)(words|word count|number of words)", "and how many words[ does it have]",
    "and in words", "words too", "now its words"),
    "file_size": ("and (the |its |)size", "and how (big|large)[ is it]", "and in bytes", "its size too",
    "now its size"),
    "file_date": ("and (the |its |)(date|last change|modification date)", "and when was it [last ]changed",
    "and how old is it", "its date too", "and since when"),
    "read_file": ("and what does it say", "and (the |its |)(contents|text)", "now (read|show|open) it",
    "read it", "(ok, |)show it to me", "and what is in it"),
}  # fmt: skip
# The same request about another file.
SAME_AGAIN = (
    "and {F}",
    "what about {F}",
    "and for {F}",
    "how about {F}",
    "now {F}",
    "same for {F}",
    "the same (for|with) {F}",
    "and {F}, please",
    "and also {F}",
    "do {F} too",
    "now the same for {F}",
    "then {F}",
)

# --- two steps ---------------------------------------------------------------------------------------

PROPERTY: dict[str, tuple[str, ...]] = {
    "count_lines": ("(line count|number of lines|lines)",),
    "count_words": ("(word count|number of words|words)",),
    "file_size": ("(size|file size|size in bytes|bytes)",),
    "file_date": ("(date|last change|modification date|date of the last change)",),
}  # fmt: skip
CLAUSE: dict[str, tuple[str, ...]] = {
    "count_lines": ("how many lines (it has|there are in it)",),
    "count_words": ("how many words (it has|there are in it)",),
    "file_size": ("how (big|large) it is", "what its size is"),
    "file_date": ("when it was [last ](changed|modified|edited|saved)", "how old it is"),
}  # fmt: skip
PAIR = (
    "what are the {one} and the {two} of {F}", "(give|tell|show|get) me the {one} and [the ]{two} of {F}",
    "{one} and {two} of {F}", "(find|check|report|get) the {one} and the {two} of {F}",
    "I need the {one} and the {two} of {F}",
    "(for|about) {F}, (tell|give) me the {one} and the {two}", "{path}: {one} and {two}",
    "the {one} of {F}, then its {two}", "tell me the {one} of {F} and also the {two}",
    "what is the {one} of {F}, and what is its {two}", "both {one} and {two} of {F}",
)  # fmt: skip
PAIR_CLAUSES = (
    "tell me about {F}: {one} and {two}", "I want to know about {F}: {one} and {two}",
    "look at {F} and tell me {one} and {two}", "take {F} and find out {one} and {two}",
    "check {F}: {one}, and {two}", "{F}: {one} and {two}", "about {F}, say {one} and then {two}",
)  # fmt: skip
LINES_AND_WORDS = (
    "how many {one} and {two} (are in|does) {F}",
    "count the {one} and [the ]{two} (in|of) {F}",
    "how many {one} and how many {two} (are in|are there in) {F}",
    "count {one} and {two} of {F}",
    "{one} and {two} in {F}",
)

BOTH: dict[str, tuple[str, ...]] = {
    "count_lines": ("how many lines (do {A} and {B} have|are in {A} and in {B}|are in {A} and {B})",
    "count the lines (in|of) {A} and {B}", "count the lines of {A} and then [those ]of {B}",
    "line counts of {A} and {B}", "(which is longer in lines|which has more lines), {A} or {B}"),
    "count_words": ("how many words (do {A} and {B} have|are in {A} and in {B}|are in {A} and {B})",
    "count the words (in|of) {A} and {B}", "count the words of {A} and then [those ]of {B}",
    "word counts of {A} and {B}", "which has more words, {A} or {B}"),
    "file_size": ("how (big|large) are {A} and {B}",
    "(give me|tell me|check) the (size|sizes) of {A} and {B}", "what are the sizes of {A} and {B}",
    "sizes of {A} and {B}", "which is (bigger|larger|smaller), {A} or {B}",
    "compare the sizes of {A} and {B}"),
    "file_date": ("when were {A} and {B} [last ](changed|modified|edited)",
    "(give me|tell me|check) the dates of {A} and {B}", "dates of {A} and {B}",
    "which is (newer|older), {A} or {B}", "when was {A} changed and when was {B} changed"),
    "read_file": ("(read|show me|open|print) {A} and {B}", "what do {A} and {B} (say|contain)",
    "read {A} and then {B}", "(first read|read first) {A}, then {B}", "cat {A} {B}"),
}  # fmt: skip
TOGETHER: dict[str, tuple[str, ...]] = {
    "count_lines": ("how many lines do {A} and {B} have (together|in total|altogether|in all)",
    "add the line counts of {A} and {B}", "total number of lines in {A} and {B} together",
    "what is the sum of the lines of {A} and {B}"),
    "count_words": ("how many words do {A} and {B} have (together|in total|altogether|in all)",
    "add the word counts of {A} and {B}", "total number of words in {A} and {B} together",
    "what is the sum of the words of {A} and {B}"),
}  # fmt: skip
LIST_THEN_READ = (
    "list {D} and [then ](read|open|show) {path}",
    "(show|list) the files in {D}, then (read|open|show me) {path}", "(first |)list {D}; then read {path}",
    "what is in {G}, and what does {path} say", "look in {G} and [then ]read {path}",
    "which files are in {D}? Then read {path}",
)  # fmt: skip
LIST_THEN_FIRST = (
    "read the first file (in|of) {D}", "list {D} and read the first (file|one|entry)",
    "look in {G} and (open|read) the first file", "what does the first file in {D} say",
    "show me the first file of {D}", "open whatever comes first in {G}", "list {D}, then show the first file",
)  # fmt: skip
SEARCH_THEN: dict[str, tuple[str, ...]] = {
    "read_file": ("find the file in {D} (that contains|with|mentioning) {Q} and (read|open|show) it",
    "search {D} for {Q} and (read|open) the (file|first file)( you find| found|)",
    "which file in {D} (has|contains|mentions) {Q}, and what does it say",
    "look for {Q} in {D}, then read the file", "read the file in {D} that (contains|mentions) {Q}"),
    "file_size": ("find the file in {D} (that contains|with|mentioning) {Q} and tell me (its size|how big it is)",
    "search {D} for {Q} and (give|tell) me the size of the (file|first file)",
    "which file in {D} (has|contains|mentions) {Q}, and how (big|large) is it",
    "how (big|large) is the file in {D} that (contains|mentions) {Q}"),
    "count_lines": ("find the file in {D} (that contains|with|mentioning) {Q} and count its lines",
    "search {D} for {Q} and count the lines of the (file|first file)",
    "which file in {D} (has|contains|mentions) {Q}, and how many lines does it have",
    "how many lines has the file in {D} that (contains|mentions) {Q}"),
    "count_words": ("find the file in {D} (that contains|with|mentioning) {Q} and count its words",
    "search {D} for {Q} and count the words of the (file|first file)",
    "which file in {D} (has|contains|mentions) {Q}, and how many words does it have"),
    "file_date": ("find the file in {D} (that contains|with|mentioning) {Q} and tell me when it was [last ]changed",
    "search {D} for {Q} and (give|tell) me the date of the (file|first file)",
    "which file in {D} (has|contains|mentions) {Q}, and when was it changed",
    "when was the file in {D} that (contains|mentions) {Q} changed"),
}  # fmt: skip
TIME_AND = (
    "what time is it, and {ask}",
    "tell me the time and {do}",
    "{do} and tell me (the time|what time it is)",
    "{ask}, and what (time|date|day) is it",
)

# --- no tool is needed, or none fits -----------------------------------------------------------------

GREETINGS = (
    "hello", "hi", "hey", "hello there", "hi there", "hey there",
    "good (morning|evening|afternoon|day|night)", "greetings", "howdy", "hello agent",
    "hi (bot|agent|friend|again)", "yo", "hey you", "hello again", "how are you", "how are you (doing|today)",
    "how is it going", "what's up", "nice to meet you", "welcome", "hallo", "bonjour", "are you there",
    "anyone there", "are you awake", "you there", "hello, how are you", "hi, are you ready",
)  # fmt: skip
THANKS = (
    "(thanks|thank you|many thanks|thanks a lot|thank you very much|thank you so much|thx|cheers|ty)",
    "(great|perfect|good|nice|super|cool|ok), (thanks|thank you)",
    "(thanks|thank you) for (your help|helping|that|the answer|everything)",
    "that (helped|was helpful|is all I needed)", "well done", "good job", "you are (great|helpful|the best)",
    "awesome", "much appreciated", "nice work", "that's great", "I appreciate it",
)  # fmt: skip
FAREWELLS = (
    "(bye|goodbye|bye bye|see you|see you later|farewell|good night|cu|ciao|so long|until tomorrow|I have to go)",
    "that's all, (bye|goodbye)",
    "(bye|goodbye) for now",
    "talk to you later",
)
ABILITIES = (
    "what can you do", "what are you able to do", "what can you do for me", "how can you help [me]", "help",
    "which tools do you have", "what tools (do you have|can you use|are there|are available)",
    "list your tools", "what are your (tools|abilities|skills|functions)", "what do you know how to do",
    "show me your tools", "tell me what you can do", "what are you good (at|for)", "how do you work",
    "what is possible here", "what can I ask [you]", "what kind of things can you do", "name your tools",
    "your tools",
)  # fmt: skip
IDENTITY = (
    "who are you",
    "what are you",
    "what is your name",
    "what's your name",
    "introduce yourself",
    "tell me about yourself",
    "are you (a robot|human|a bot|an AI|a person|a program|a model|real)",
    "who (made|built|wrote|trained) you",
    "what (model|program) are you",
    "who am I talking to",
)

NO_TOOL = (
    "what is the weather (like |)(in {city}|today|tomorrow|outside|)",
    "will it rain (in {city}|today|tomorrow)",
    "(how (warm|cold|hot) is it|is it (warm|cold|sunny)) (in {city}|outside|today)",
    "who is the (president|king|mayor|prime minister|queen) of {city}", "what is the capital of {city}",
    "how many people live in {city}", "where is {city}", "how far is it to {city}",
    "book (a flight|a table|a hotel|a room|tickets) (in|to|for) {city}",
    "find me a (restaurant|hotel|flight|doctor|job) in {city}",
    "send (an email|a mail|a message|a letter|{path}) to {person}",
    "(write|call|text|phone|ring|email|mail|message) {person}",
    "tell {person} (hello|that I am late|the news|to come)",
    "(invite|remind|ask) {person} (to lunch|about the meeting|for help)",
    "set (an alarm|a timer|a reminder) for {number} (minutes|hours|o'clock)",
    "remind me (in {number} minutes|tomorrow|to call {person}|of my appointment)", "wake me [up] at {number}",
    "add (a meeting|an appointment|lunch) to my calendar",
    "order (a pizza|a taxi|some food|new shoes|coffee)", "buy {number} (apples|shares|tickets|stamps)",
    "what is the price of (gold|bitcoin|oil|{word})", "how is the stock market",
    "(delete|remove|erase|destroy|trash|unlink) {F}", "rm {path}", "rm -rf {folder}",
    "(delete|remove|empty) {G}", "(rename|move|copy) {F} to {other}", "mv {path} {other}",
    "cp {path} {other}", "(move|copy) {F} (into|to) {G}",
    "(create|make|write) (a |the |a new |)file (called |named |){path}",
    "(create|make) (a |the |a new |)folder (called |named |){folder}", "mkdir {folder}", "touch {path}",
    "(edit|change|fix|modify|overwrite|rewrite|update|correct) {F}", "write {pattern} (to|into) {F}",
    "(append|add) {pattern} to {F}", "replace {pattern} (with|by) {word} in {F}",
    "save this (as|to|in) {path}",
    "(run|execute|start|launch) {F}", "(compile|build|install|deploy|test|debug|format|lint) {F}",
    "(zip|compress|archive|encrypt|unpack|extract|decompress|sign) {F}",
    "(upload|download|share|publish|post|sync|back up) {F}", "(print {F} on (paper|the printer))",
    "(convert {F} to (pdf|mp3|html|png|csv))",
    "(translate {F} (to|into) (german|french|spanish|english|chinese))", "chmod 755 {path}",
    "sort (the lines of |){F}", "(diff|merge|join) {F} (and|with) {other}",
    "(commit|push|pull|clone|revert) (my changes|the repository|{F}|{folder})",
    "make {F} (read-only|executable|public|smaller)", "who (owns|wrote|created|sent) {F}",
    "(hash|checksum|md5) {F}", "git (push|status|commit|pull|log|diff)", "sudo (reboot|rm -rf /|su)",
    "(translate|say) {pattern} (in|to|into) (german|french|spanish|english|italian|japanese)",
    "what does {word} mean[ in (german|french|english)]", "(spell|define|pronounce|rhyme) {word}",
    "(write|compose|sing|make up|invent) (me |)(a|an) (poem|song|story|joke|essay|email|haiku|letter|novel)( about {word}|)",
    "tell me (a joke|a story|something funny|a secret|a fact|the news|about {word}|about {person})",
    "explain (gravity|quantum physics|love|the internet|recursion|{word})( to me|)",
    "(play|stop|pause|skip) (the music|some music|a song|a video|chess|the radio)",
    "(turn|switch) (on|off) the (light|lights|heating|radio|tv|computer)",
    "(open|close) the (door|window|browser|garage)",
    "(draw|paint|generate|show me|make) (a picture|an image|a photo|a diagram|a logo) of {word}",
    "take a (photo|screenshot|picture|selfie|note)",
    "(search|google|look up|browse) the (web|internet) for {Q}",
    "(open|visit|load|fetch|download) (https://{word}.com|www.{word}.org|the page {word}.net)",
    "what is on (tv|the news|wikipedia|my screen)",
    "who (is|was) {person}", "when was {person} born", "how old (is {person}|are you|am I)",
    "who won (the match|the game|the election|the race|the cup)", "what is the meaning of life",
    "do you (love|like|hate|dream of) (me|music|cats|humans|{word})",
    "what (should|shall) I (eat|wear|do|cook|read|buy|watch)( today| tonight|)",
    "give me (a recipe for {word}|some advice|a hint|money|an idea|a password)",
    "recommend a (book|film|song|game|wine)", "why is the sky blue",
    "how do I (cook rice|tie a tie|learn french|fix a bike|get rich)",
    "what is my (name|ip address|password|username|phone number|age|blood type)",
    "how many (legs has a spider|planets are there|days has a year|people live on earth)",
    "which is better, {word} or {word}", "pick a (card|colour|number|name)", "(roll|throw) a (die|dice|coin)",
    "flip a coin", "generate a (password|random number|uuid|key)", "shut down (the computer|now|everything)",
    "restart (the computer|the server|my phone)",
    "how much (memory|ram|disk space|battery) (is free|is left|do I have)", "which processes are running",
    "is the server (up|down|online|running)", "ping {word}.com",
    "what (songs|photos|emails|messages|contacts) do I have", "read my (mail|email|messages|mind|palm)",
    "show my (calendar|contacts|photos|messages|mail)", "what did {person} (say|write|want|send)",
    "how do you feel", "can you (fly|sing|swim|cook|dance|drive|see me)",
    "where (am I|do I live|is {person}|is my phone|are my keys)", "summarise the (news|meeting|book|film)",
)  # fmt: skip

CITIES = (
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Tokyo",
    "Delhi",
    "Sydney",
    "Boston",
    "Zürich",
    "Vienna",
    "Prague",
    "Dublin",
    "Athens",
    "Lisbon",
    "France",
    "Peru",
    "Japan",
    "Norway",
    "Kenya",
    "Canada",
    "Spain",
)
PEOPLE = (
    "Anna",
    "Bob",
    "Carla",
    "David",
    "Emma",
    "Frank",
    "Maria",
    "Peter",
    "Sofia",
    "Tom",
    "Yuki",
    "Ahmed",
    "my mother",
    "my boss",
    "Mr Smith",
    "Dr. Jones",
    "Einstein",
    "Mozart",
    "Ada Lovelace",
    "Alice",
    "Olga",
    "Li Wei",
    "the landlord",
    "José",
    "support",
)

# --- other tools, so that the tool lines must be read ------------------------------------------------

# name, ((argument, kind), ...), descriptions, requests. The kinds are slots: path, folder, pattern, person, city, word, number, other.
Other = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]
OTHER_TOOLS: tuple[Other, ...] = (
    ("delete_file", (("path", "path"),), ("Delete a file", "Remove a file for good"),
    ("(delete|remove|erase|trash|get rid of) {F}", "rm {path}")),
    ("make_folder", (("folder", "folder"),), ("Create a folder", "Make a new directory"),
    ("(create|make) (a |the |a new |)folder (called |named |){folder}", "mkdir {folder}")),
    ("copy_file", (("path", "path"), ("target", "other")), ("Copy a file", "Make a copy of a file"),
    ("copy {F} to {other}", "make a copy of {F} called {other}", "cp {path} {other}")),
    ("rename_file", (("path", "path"), ("name", "other")), ("Rename a file", "Give a file a new name"),
    ("rename {F} to {other}", "mv {path} {other}", "call {F} {other} from now on")),
    ("run_program", (("path", "path"),), ("Run a program", "Execute a script"),
    ("(run|execute|start|launch) {F}",)),
    ("send_mail", (("to", "person"), ("text", "pattern")), ("Send an email", "Mail a text to someone"),
    ("(send|mail|write) {pattern} to {person}", "email {person}: {pattern}")),
    ("weather", (("city", "city"),), ("Weather in a city", "Look up the weather forecast"),
    ("what is the weather (like |)in {city}", "will it rain in {city}", "how (warm|cold) is it in {city}",
    "weather {city}")),
    ("translate", (("text", "pattern"),), ("Translate a text to English", "Translate into English"),
    ("translate {pattern}", "translate {pattern} (to|into) english", "what does {pattern} mean in english")),
    ("define_word", (("word", "word"),), ("Look up a word", "Definition of a word"), ("define {word}",
    "what does {word} mean", "what is the definition of {word}")),
    ("set_timer", (("minutes", "number"),), ("Start a timer", "Set a timer in minutes"),
    ("set a timer for {number} minutes", "(start|set) a {number} minute timer",
    "wake me in {number} minutes")),
    ("play_song", (("title", "pattern"),), ("Play a song", "Play music by title"), ("play {pattern}",
    "play the song {pattern}", "I want to hear {pattern}")),
    ("open_url", (("url", "word"),), ("Open a web page", "Load a site in the browser"),
    ("(open|visit|load) the (page|site) {word}", "browse to {word}")),
    ("hash_file", (("path", "path"),), ("Checksum of a file", "SHA-256 of a file"), ("(hash|checksum) {F}",
    "what is the (hash|checksum|sha256) of {F}", "md5 of {F}")),
    ("owner", (("path", "path"),), ("Who owns a file", "Owner of a file"), ("who owns {F}", "owner of {F}",
    "whose file is {F}")),
    ("echo", (("text", "pattern"),), ("Echo the text back", "Repeat a text"), ("(echo|repeat|say) {pattern}",
    "say {pattern} back to me")),
    ("sort_lines", (("path", "path"),), ("Sort the lines of a file", "Lines in alphabetical order"),
    ("sort {F}", "sort the lines (of|in) {F}", "put the lines of {F} in order")),
    ("find_file", (("name", "path"),), ("Find a file by name", "Locate a file anywhere"), ("where is {F}",
    "locate {F}", "find the file {path}", "in which folder is {path}")),
    ("last_lines", (("path", "path"),), ("Last lines of a file", "End of a file"),
    ("show the (end|last lines|tail) of {F}", "tail {path}", "how does {F} end")),
    ("disk_free", (), ("Free space on the disk", "How much room is left"),
    ("how much (disk space|space|room) is (free|left)", "df", "is the disk full")),
    ("uptime", (), ("How long the machine runs", "Time since the start"),
    ("how long is the (machine|computer) running", "uptime", "when was the last (reboot|restart)")),
    ("random_number", (("limit", "number"),), ("A random number up to a limit", "Throw dice"),
    ("(give me|pick) a random number up to {number}", "random number below {number}")),
    ("call_person", (("name", "person"),), ("Call someone", "Phone a contact"), ("(call|phone|ring) {person}",
    "get {person} on the phone")),
)  # fmt: skip

# Other names and descriptions of the demo tools.
ALIASES: dict[str, tuple[str, ...]] = {
    "list_files": ("ls", "list_dir", "list_folder", "dir", "show_folder", "files_in", "list_directory"),
    "read_file": ("cat", "show_file", "open_file", "file_text", "get_file", "view_file", "read_text"),
    "count_lines": ("line_count", "lines", "wc_lines", "number_of_lines", "lines_in_file"),
    "count_words": ("word_count", "words", "wc_words", "number_of_words", "words_in_file"),
    "search_text": ("grep", "find_text", "search", "search_files", "look_for", "find_in_files"),
    "file_size": ("size", "size_of", "bytes", "get_size", "byte_count"),
    "file_date": ("date_of", "mtime", "last_change", "modified", "when_changed", "get_date"),
    "calculate": ("calc", "compute", "math", "evaluate", "arithmetic", "calculator"),
    "current_time": ("now", "clock", "time", "get_time", "today", "date_and_time"),
}
ARGUMENT_NAMES: dict[str, tuple[str, ...]] = {
    "path": ("file", "filename", "name", "file_path", "path"),
    "folder": ("dir", "directory", "path", "folder_name", "folder"),
    "pattern": ("text", "query", "words", "needle", "pattern"),
    "expression": ("formula", "input", "sum", "expr", "expression"),
}
DESCRIPTIONS: dict[str, tuple[str, ...]] = {
    "list_files": (
        "List a folder",
        "Names of the files in a folder",
        "Show what is in a directory",
        "List files",
    ),
    "read_file": (
        "Read a file from disk",
        "Show the text of a file",
        "Print what a file contains",
        "Read a file",
    ),
    "count_lines": ("Number of lines in a file", "How many lines a file has", "Count lines"),
    "count_words": ("Number of words in a file", "How many words a file has", "Count words"),
    "search_text": (
        "Find a text in files",
        "Look for words in a file or a folder",
        "Search files for a string",
    ),
    "file_size": ("How big a file is", "Bytes of a file", "Get the size of a file"),
    "file_date": (
        "Date of the last change of a file",
        "Modification date of a file",
        "When a file was modified",
    ),
    "calculate": ("Evaluate an arithmetic expression", "Do arithmetic", "Compute a sum", "Simple calculator"),
    "current_time": ("The time now", "What time and day it is", "Tell the date and the time"),
}
HEADERS = (
    "You are a helpful assistant.", "You are a careful assistant with tools.",
    "You help with files on this computer.", "You are an agent on a laptop. Be brief.",
    "You answer questions about the user's files.", "Act as a file clerk.", "You are a small agent.",
    "Be helpful and exact.", "You are a specialized agent for files and numbers.",
)  # fmt: skip
