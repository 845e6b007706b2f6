"""The style sheet of the pages. Colours of tokens are RGB triples, so that a weight can be their opacity."""

STYLE = """
:root { --ink: #1c2330; --soft: #5c6675; --line: #dde2ea; --paper: #fff; --ground: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 6px; }
p { margin: 0 0 10px; } .soft, figcaption, .note { color: var(--soft); font-size: 13px; } .note { margin: 8px 0 0; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin-top: 16px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0 0; padding: 0; list-style: none; }
.chips li { background: #eaeef4; border-radius: 11px; padding: 2px 11px; font-size: 13px; overflow-wrap: anywhere; } .chips b { font-weight: 600; }
.chips .warn { background: #fde8d7; color: #7a3300; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px; }
figure { margin: 0; max-width: 560px; } figure svg { display: block; width: 100%; height: auto; border-radius: 6px; background: #888; }
figure svg.pixels { image-rendering: pixelated; } figcaption { margin-top: 6px; }
.definitions { position: absolute; }
polygon { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; } polygon.halo { stroke: #fff; stroke-width: 5; stroke-opacity: 0.75; }
svg text { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-weight: 700; stroke: #fff; paint-order: stroke; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-size: 12px; color: var(--soft); font-weight: 600; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.objects th { white-space: nowrap; } .objects td:last-child { width: 34%; }
td.mark { white-space: nowrap; width: 1%; padding-right: 12px; font: 700 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.bins { color: var(--soft); font: 12px ui-monospace, "DejaVu Sans Mono", monospace; display: block; }
.text, .tokens { font: 13px/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f8f9fb; border: 1px solid var(--line); border-radius: 6px; padding: 8px 10px; margin: 0; }
.text .cut { color: #a02020; background: #fdeaea; text-decoration: line-through; text-decoration-color: #d88; }
.code { color: #8a4b00; background: #fff3dc; border-radius: 3px; font-weight: 400; font-size: 0.85em; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2; }
.tokens i { font-style: normal; unicode-bidi: isolate; padding: 2px 0; box-shadow: inset 1px 0 0 #0002; }
.run { --c: 130 140 155; background: rgb(var(--c) / var(--a, 0)); border-bottom: 2px solid rgb(var(--c)); padding: 2px 0; border-radius: 2px;
       -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.run.neutral { color: #6b7482; border-bottom: 1px dotted #aab2bd; }
.run.structure { --c: 37 110 235; } .run.desc { --c: 22 150 80; } .run.matched_structure { --c: 130 80 220; }
.run.coord { --c: 240 150 20; } .run.coord i { padding: 2px 3px; } .run.coord b { font-weight: 600; } .run.closing { --c: 220 50 110; }
.legend { margin-bottom: 12px; } .legend td { border: 0; padding: 2px 14px 2px 0; } .legend td:nth-child(-n+3), .legend th { white-space: nowrap; }
.legend .tokens { line-height: 1.7; } .legend .run { margin-right: 6px; } .legend .run i { padding: 2px 5px; box-shadow: none; }
.seam { color: #fff; background: #3c4656; border-radius: 3px; padding: 2px 6px; margin: 0 4px; font-size: 11px; }
.run.context { color: #6b7482; border-bottom: 0; } .run.context i { box-shadow: none; }
.run.up { --c: 37 110 235; } .run.down { --c: 214 90 10; border-bottom-style: double; border-bottom-width: 3px; } .run.unusable { --c: 200 30 60; --a: 0.3; }
.dialogue { display: grid; grid-template-columns: minmax(60px, max-content) minmax(0, 1fr); gap: 8px 14px; }
.dialogue .who { font-size: 13px; font-weight: 600; color: var(--soft); text-align: right; padding-top: 9px; max-width: 120px; overflow-wrap: anywhere; }
.dialogue .text.completion { background: #eef4ff; border-color: #c9d9f8; }
.dialogue .border { grid-column: 1 / -1; font-size: 12px; color: var(--soft); border-top: 1px dashed #aab2bd; padding-top: 4px; margin-top: 4px; }
.call { border-left: 3px solid #8a4b00; padding-left: 8px; } .field { color: var(--soft); font-size: 12px; }
.figures { margin-bottom: 14px; } .figures td { font-variant-numeric: tabular-nums; }
"""
