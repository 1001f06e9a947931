"""Word lists of the bundled demo data: plain facts and everyday words, written for this project.

Read by bench/make_demo_assets.py. Order matters: the generator draws from these lists with a seeded
random number generator, so a change here changes every later record.
"""


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split(",")


def _table(text: str) -> list[list[str]]:
    """Rows are separated by commas, columns by colons."""
    return [row.split(":") for row in text.split(",")]


def _pairs(text: str) -> dict[str, str]:
    return {left: right for left, right in _table(text)}


# Country -> capital city.
CAPITALS = _pairs(
    "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Greece:Athens,Austria:Vienna,"
    "Poland:Warsaw,Hungary:Budapest,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,"
    "Iceland:Reykjavik,Ireland:Dublin,Belgium:Brussels,Czechia:Prague,Croatia:Zagreb,Romania:Bucharest,"
    "Bulgaria:Sofia,Egypt:Cairo,Kenya:Nairobi,Ghana:Accra,Morocco:Rabat,Tunisia:Tunis,Ethiopia:Addis Ababa,"
    "Senegal:Dakar,Japan:Tokyo,China:Beijing,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,Nepal:Kathmandu,"
    "Mongolia:Ulaanbaatar,Indonesia:Jakarta,Canada:Ottawa,Mexico:Mexico City,Cuba:Havana,Peru:Lima,"
    "Chile:Santiago,Argentina:Buenos Aires,Uruguay:Montevideo,Colombia:Bogota,Ecuador:Quito,Australia:Canberra,"
    "New Zealand:Wellington,Latvia:Riga,Estonia:Tallinn,Lithuania:Vilnius,Slovenia:Ljubljana"
)

# Chemical element -> (symbol, atomic number).
ELEMENTS = {
    name: (symbol, int(number))
    for name, symbol, number in _table(
        "hydrogen:H:1,helium:He:2,lithium:Li:3,beryllium:Be:4,boron:B:5,carbon:C:6,nitrogen:N:7,oxygen:O:8,"
        "fluorine:F:9,neon:Ne:10,sodium:Na:11,magnesium:Mg:12,aluminium:Al:13,silicon:Si:14,phosphorus:P:15,"
        "sulfur:S:16,chlorine:Cl:17,argon:Ar:18,potassium:K:19,calcium:Ca:20,iron:Fe:26,nickel:Ni:28,copper:Cu:29,"
        "zinc:Zn:30,silver:Ag:47,tin:Sn:50,gold:Au:79,mercury:Hg:80,lead:Pb:82,uranium:U:92"
    )
}

# Animal -> (kind, number of legs, name of the young).
ANIMALS = {
    name: (kind, int(legs), young)
    for name, kind, legs, young in _table(
        "dog:mammal:4:puppy,cat:mammal:4:kitten,cow:mammal:4:calf,horse:mammal:4:foal,sheep:mammal:4:lamb,"
        "goat:mammal:4:kid,pig:mammal:4:piglet,bear:mammal:4:cub,lion:mammal:4:cub,deer:mammal:4:fawn,"
        "rabbit:mammal:4:kit,fox:mammal:4:cub,kangaroo:mammal:2:joey,elephant:mammal:4:calf,giraffe:mammal:4:calf,"
        "duck:bird:2:duckling,goose:bird:2:gosling,chicken:bird:2:chick,eagle:bird:2:eaglet,owl:bird:2:owlet,"
        "swan:bird:2:cygnet,penguin:bird:2:chick,frog:amphibian:4:tadpole,turtle:reptile:4:hatchling,"
        "crocodile:reptile:4:hatchling,butterfly:insect:6:caterpillar"
    )
}

OPPOSITES = _pairs(
    "hot:cold,big:small,tall:short,fast:slow,early:late,light:dark,open:closed,full:empty,happy:sad,young:old,"
    "rich:poor,strong:weak,hard:soft,wet:dry,clean:dirty,loud:quiet,near:far,high:low,thick:thin,wide:narrow,"
    "deep:shallow,sharp:blunt,sweet:sour,brave:afraid,cheap:expensive,simple:complex,ancient:modern,polite:rude,"
    "safe:dangerous,rough:smooth,heavy:weightless,bitter:mild,awake:asleep,alive:dead,first:last,inside:outside,"
    "above:below,before:after,more:less,always:never,buy:sell,give:take,push:pull,win:lose,begin:end,"
    "arrive:leave,remember:forget,float:sink,ask:answer"
)

# Verb in the present -> past tense.
PAST_TENSE = _pairs(
    "go:went,eat:ate,see:saw,take:took,give:gave,come:came,run:ran,write:wrote,read:read,speak:spoke,drive:drove,"
    "sing:sang,swim:swam,begin:began,break:broke,bring:brought,build:built,buy:bought,catch:caught,choose:chose,"
    "draw:drew,drink:drank,fall:fell,feel:felt,find:found,fly:flew,forget:forgot,grow:grew,hear:heard,hide:hid,"
    "hold:held,keep:kept,know:knew,leave:left,lose:lost,make:made,meet:met,pay:paid,ride:rode,ring:rang,say:said,"
    "sell:sold,send:sent,sleep:slept,spend:spent,stand:stood,steal:stole,teach:taught,tell:told,think:thought,"
    "throw:threw,wake:woke,wear:wore,win:won,walk:walked,paint:painted,visit:visited,carry:carried,study:studied,"
    "plan:planned,stop:stopped,open:opened,help:helped"
)

# Singular -> plural.
PLURALS = _pairs(
    "child:children,foot:feet,tooth:teeth,mouse:mice,goose:geese,leaf:leaves,knife:knives,wolf:wolves,"
    "city:cities,story:stories,box:boxes,bus:buses,dish:dishes,potato:potatoes,hero:heroes,man:men,woman:women,"
    "person:people,sheep:sheep,fish:fish,book:books,table:tables,river:rivers,baby:babies,party:parties,key:keys,"
    "toy:toys,church:churches,glass:glasses,shelf:shelves,life:lives,half:halves,country:countries,"
    "family:families,library:libraries,watch:watches"
)

# Thing -> its usual colour.
COLOURS = _pairs(
    "grass:green,snow:white,coal:black,a ripe banana:yellow,a ripe tomato:red,a clear sky:blue,chocolate:brown,"
    "a carrot:orange,a lemon:yellow,milk:white,a cucumber:green,an emerald:green,a ruby:red,a sapphire:blue,"
    "a flamingo:pink,a raven:black,a strawberry:red,a plum:purple,an aubergine:purple,butter:yellow"
)

WORDS = _words(
    "apple bridge candle desert engine forest garden hammer island jacket kettle ladder market needle ocean "
    "pencil quilt rocket saddle tunnel umbrella valley window yellow zebra anchor basket castle dragon eagle "
    "feather guitar harbour iron jungle kitchen lantern mirror napkin orange pepper queen ribbon silver thunder "
    "uncle violin wagon blanket camera diamond elbow finger glacier honey insect jewel kingdom lemon magnet "
    "number orchard pillow quarter rabbit season temple village whistle acorn barrel cotton dolphin evening "
    "fountain gravel hill ink jar knot lake meadow night olive planet river stone tiger valley winter arrow "
    "beach cloud drum ember flute grape horizon ivy jelly kite lamp maple nest opal pond rain shell thread vase "
    "wheel bread copper danger effort flavour ground hunger instant journey knowledge leather moment nature "
    "office palace reason shadow ticket useful voyage weather bottle corner dinner effort figure gather humble "
    "invite jumble kernel little master notice object parent record simple travel update visitor wonder absent "
    "bright common direct enough fierce gentle honest junior kindly lively modest narrow obvious patient quickly "
    "rapid steady tender urgent vivid wooden young"
)

NAMES = _words(
    "Ada Ben Clara David Elena Felix Grace Hugo Irene Jonas Kira Leo Mara Nils Olga Paul Rosa Simon Tara Ugo "
    "Vera Walter Yara Zoe Anton Bella Carlos Dina Emil Farah Georg Hana Ivan Julia Karim Lena Milan Nora Oscar "
    "Priya Ravi Sara Tomas Uma Viktor"
)

JOBS = _words(
    "baker carpenter doctor engineer farmer gardener journalist librarian mechanic nurse painter pilot sailor "
    "tailor teacher writer musician fisher chemist judge builder cook driver scientist plumber potter"
)

PLACES = _phrases(
    "in the old harbour,at the railway station,behind the school,near the mountain lake,in a quiet village,"
    "on the market square,beside the river,at the edge of the forest,in the city library,on a small island,"
    "under the stone bridge,in the kitchen"
)

ITEMS = _words(
    "apples pears books coins pencils eggs stamps tickets shells marbles oranges cups plates chairs bottles "
    "candles cards buttons stones flowers"
)

WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
PLANETS = _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")

# (larger unit, smaller unit, how many smaller in one larger)
UNITS = (
    ("metres", "centimetres", 100),
    ("kilometres", "metres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("years", "months", 12),
    ("dozens", "pieces", 12),
    ("centimetres", "millimetres", 10),
    ("feet", "inches", 12),
)
