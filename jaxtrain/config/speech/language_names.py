"""The languages that published speech models are asked for by name, and the codes in their tokens."""

_NAMES = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese, tr turkish,
pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi, fi finnish, vi vietnamese,
he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian,
th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian, kn kannada, et estonian,
mk macedonian, br breton, eu basque, is icelandic, hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh,
sq albanian, sw swahili, gl galician, mr marathi, pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali,
af afrikaans, oc occitan, ka georgian, be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao,
uz uzbek, fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish,
my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""
# Other names of some of them.
_MORE = """
es castilian, zh mandarin, nl flemish, ca valencian, ro moldavian, ro moldovan, pa panjabi, si sinhalese, ps pushto,
my burmese, ht haitian, lb letzeburgesch
"""
CODES = {name: code for part in f"{_NAMES},{_MORE}".split(",") for code, name in [part.split(maxsplit=1)]
         for name in [name.strip()]}


def code_of(language: str) -> str:
    """Return the code of a language that is given by its code, its name, or its token such as <|de|>."""
    plain = language.strip().lower().removeprefix("<|").removesuffix("|>")
    return CODES.get(plain, plain)
