"""The look of the pages: readable on a phone and on a wide screen, in light and dark mode, and in print."""

STYLE = """
:root{color-scheme:light dark;--text:#1d2129;--soft:#596273;--surface:#fff;--card:#f3f5f8;--edge:#d4d9e1;
--track:#e7eaef;--line0:#1f5f99;--line1:#b8480a}
@media(prefers-color-scheme:dark){:root{--text:#e6e9ef;--soft:#a3adbd;--surface:#14171c;--card:#1d2229;--edge:#3a424e;
--track:#2a3039;--line0:#7db8ee;--line1:#f2a067}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:var(--text);background:var(--surface);max-width:68rem;margin:0 auto;
padding:1rem}
h1{font-size:clamp(1.4rem,4.5vw,2rem);line-height:1.2;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
p,ul{margin:.4rem 0}.soft,caption{color:var(--soft)}.reasons{padding-left:1.2rem;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--edge);border-radius:.6rem;padding:1rem;margin:1rem 0}
.card .layout{font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(max(7.5rem,21%),1fr));gap:.6rem;margin:.8rem 0}
.facts dt{color:var(--soft);font-size:.85rem}.facts dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;overflow-wrap:anywhere;user-select:all;font:.875rem/1.5 ui-monospace,monospace;margin:.3rem 0;
background:var(--surface);border:1px solid var(--edge);border-radius:.4rem;padding:.6rem}
table{border-collapse:collapse;font-size:.875rem;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid var(--edge);vertical-align:top}
th{color:var(--soft);font-weight:600}
td{white-space:nowrap}td.text,th{white-space:normal}td.rank{white-space:nowrap}
.text{text-align:left}.long{overflow-wrap:anywhere;min-width:14rem}.total td{font-weight:600}
figure{margin:.9rem 0}figcaption{font-size:.9rem;overflow-wrap:anywhere}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.15rem .9rem;font-size:.85rem}
.legend .group{flex-basis:100%;color:var(--soft)}
.legend i{display:inline-block;width:1em;height:1em;margin-right:.35em;vertical-align:-.12em;background:var(--c);
border-radius:2px}
.bar{position:relative;margin:.2rem 0}.stack,.hidden{display:flex;background:var(--track)}.hidden{background:none}
.part{background:var(--c);color:#111;height:1.5rem;font-size:.75rem;line-height:1.5rem;overflow:hidden;display:flex;
flex-wrap:wrap;flex:none;box-shadow:inset -1px 0 var(--surface)}
.part>span+span{padding:0 .3rem;white-space:nowrap}.part>span:first-child{height:1.5rem}
.hidden .part{height:.7rem}.hidden .part>span+span{display:none}
.legend .hatched,.hatched{background:repeating-linear-gradient(135deg,var(--c) 0 3px,var(--surface) 3px 6px)}
.bar .mark{position:absolute;top:-.15rem;bottom:-.15rem;border-left:2px solid var(--text)}
.bar .mark1{border-left-style:dotted}
.legend .mark{width:0;background:none;border-radius:0;border-left:2px solid var(--text)}
.legend .mark1{border-left-style:dotted}
.scroll{overflow-x:auto;margin:.6rem 0}.grid{width:auto}.grid td{text-align:center;border:1px solid var(--surface)}
.grid small{display:block;color:var(--soft)}.grid caption{text-align:left}
details{font-size:.85rem;color:var(--soft)}details table{max-width:34rem;color:var(--text)}summary{cursor:pointer}
.pair{display:flex;flex-wrap:wrap;gap:1rem 2rem;margin:.8rem 0}
.curves{flex:1 1 18rem;max-width:26rem;height:auto;font:12px system-ui,sans-serif;fill:var(--text)}
.curves polyline,.curves circle,.curves path{fill:none;stroke-width:2}.axis{stroke:var(--soft)}
.line0{stroke:var(--line0)}.line1{stroke:var(--line1)}
@media(max-width:44rem){table.wide,.wide tbody,.wide tr,.wide td{display:block}.wide .head{display:none}
.wide tr{border-bottom:1px solid var(--edge);padding:.5rem 0;display:flex;flex-wrap:wrap;gap:0 1rem}
.wide td{border:0;padding:0;text-align:left}.wide td.text{flex-basis:100%}
.wide td.rank{flex-basis:1.4rem;font-weight:600}.wide td.rank+td{flex:1 0 70%}
.wide td[data-head]:not([data-head=""]):not(:empty)::before{content:attr(data-head) " ";color:var(--soft)}}
@media print{body{font-size:11px;max-width:none}figure,svg,tr,.card{break-inside:avoid}h2{break-after:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
