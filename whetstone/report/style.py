"""The report's CSS: one column, quiet colours, light and dark by the reader's setting. Fetches no fonts."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f6f3; --card: #ffffff; --ink: #1d2327; --muted: #6b7378; --line: #e4e2dc;
  --accent: #1f6f78; --before: #b9bdbb; --c1: #c8793a; --c2: #6a7fb5; --c3: #8a9a4b; --c4: #a05f8a;
  --good: #2c7a4b; --good-bg: #e6f2ea; --bad: #b23b3b; --bad-bg: #f8e8e6; --note-bg: #faf3e3; --note: #8a6414;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181a; --card: #1d2123; --ink: #e8e6e1; --muted: #98a0a4; --line: #31373a;
    --accent: #5fb3bd; --before: #5b6366; --c1: #df9a5f; --c2: #93a6d8; --c3: #b1bf78; --c4: #cb90b6;
    --good: #7cc698; --good-bg: #1f3328; --bad: #e78f8a; --bad-bg: #3a2424; --note-bg: #322b1b; --note:
      #dcb866;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1000px; margin: 0 auto; padding: 56px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 4px 0 6px; overflow-wrap:
  anywhere; }
h2 { font-size: 19px; letter-spacing: -0.005em; margin: 52px 0 14px; }
sup { line-height: 0; font-size: 0.75em; }
p { margin: 0 0 12px; }
.eyebrow { color: var(--muted); font-size: 13px; letter-spacing: 0.04em; margin: 0; }
.facts { color: var(--muted); margin: 0 0 26px; }
.facts b { color: var(--ink); font-weight: 550; }
.lead { color: var(--muted); max-width: 90ch; margin: -8px 0 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; }

.headline { display: grid; grid-template-columns: auto auto auto 1fr; column-gap: 30px; align-items:
  center; padding: 28px 30px; }
.number .label { color: var(--muted); font-size: 14px; }
.number .value { font-size: 52px; line-height: 1.1; font-weight: 650; letter-spacing: -0.03em; }
.number .value small { font-size: 26px; font-weight: 500; letter-spacing: 0; color: var(--muted); }
.number .interval { color: var(--muted); font-size: 14px; }
.number.after .value { color: var(--accent); }
.arrow { font-size: 34px; color: var(--muted); }
.verdict { justify-self: end; text-align: right; }
.verdict strong { display: block; font-size: 24px; letter-spacing: -0.01em; }
.verdict.up strong { color: var(--good); }
.verdict.down strong { color: var(--bad); }
.verdict span { display: block; color: var(--muted); font-size: 14px; }
.small { color: var(--muted); font-size: 14px; margin: 12px 2px 0; }
.small b { color: var(--ink); font-weight: 550; }

.findings { list-style: none; margin: 20px 0 0; padding: 0; display: grid; gap: 8px; }
.findings li { border-radius: 10px; padding: 10px 16px; background: var(--note-bg); font-size: 15px; }
.findings li b { color: var(--note); margin-right: 6px; }
.findings li.quiet { background: none; border: 1px solid var(--line); }
.findings li.quiet b { color: var(--muted); }

figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
.on-narrow { display: none; }
figcaption { margin-bottom: 10px; line-height: 1.4; }
figcaption b { font-weight: 600; }
figcaption span { display: block; color: var(--muted); font-size: 13.5px; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.wide { grid-column: 1 / -1; }

table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th { text-align: right; font-weight: 500; color: var(--muted); padding: 6px 0 6px 14px; border-bottom:
  1px solid var(--line); }
td { text-align: right; padding: 6px 0 6px 14px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
.scroll { overflow-x: auto; margin-top: 14px; }

.example { margin-top: 16px; padding: 0; overflow: hidden; }
.example header { padding: 14px 22px; border-bottom: 1px solid var(--line); }
.example header .meta { color: var(--muted); font-size: 13px; margin-bottom: 4px; }
.question { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 190px; overflow-y: auto; }
.sides { display: grid; grid-template-columns: 1fr 1fr; }
.side { padding: 12px 22px 16px; min-width: 0; }
.side + .side { border-left: 1px solid var(--line); }
.side .meta { color: var(--muted); font-size: 13px; display: flex; gap: 10px; align-items: baseline;
  flex-wrap: wrap; }
pre {
  margin: 8px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 300px; overflow-y: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.chip { border-radius: 99px; padding: 1px 9px; font-size: 12.5px; font-weight: 600; }
.chip.right { color: var(--good); background: var(--good-bg); }
.chip.wrong { color: var(--bad); background: var(--bad-bg); }

details { margin-top: 44px; }
summary { cursor: pointer; font-weight: 600; font-size: 16px; }
.config { columns: 2; column-gap: 36px; margin-top: 12px; font-size: 13.5px; }
.config div { display: flex; justify-content: space-between; gap: 16px; break-inside: avoid; padding: 3px 0; }
.config dt, .config dd { margin: 0; overflow-wrap: anywhere; }
.config dt { color: var(--muted); flex: none; max-width: 60%; }
.config dd { text-align: right; }
footer { color: var(--muted); font-size: 13px; margin-top: 40px; }

@media (max-width: 760px) {
  main { padding: 32px 16px 56px; }
  .grid, .sides { grid-template-columns: 1fr; }
  .side + .side { border-left: 0; border-top: 1px solid var(--line); }
  .headline { grid-template-columns: 1fr auto 1fr; column-gap: 14px; padding: 22px 20px; }
  .headline .verdict { grid-column: 1 / -1; justify-self: start; text-align: left; margin-top: 14px; }
  .number .value { font-size: 38px; }
  .number .value small { font-size: 20px; }
  .config { columns: 1; }
  .card { padding: 16px; }
  .example { padding: 0; }
  .on-wide { display: none; }
  .on-narrow { display: block; }
  table { font-size: 13.5px; }
  th, td { padding-left: 10px; }
  .config div { flex-wrap: wrap; gap: 0 16px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } pre, .question { max-height:
  none; } }
""".strip()
