// The curves of one environment, drawn with Plotly.
const form = document.getElementById("choice")
const recipes = document.getElementById("recipes")
const palette = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf"]
let data = null

async function load() {
  data = await (await fetch(`curves/${form.env.value}.json`)).json()
  recipes.querySelectorAll("label").forEach((label) => label.remove())
  const drawn = data.ours.some((run) => run.colour)
  data.ours.forEach((run, i) => {
    const label = document.createElement("label")
    const box = document.createElement("input")
    Object.assign(box, { type: "checkbox", name: "recipe", value: i, checked: drawn ? run.colour : i < 2 })
    run.colour ||= palette[i % palette.length]
    const n = run.numbers.length
    label.append(box, ` ${run.label} (${n} seed${n > 1 ? "s" : ""}, ${run.script}.py)`)
    label.style.setProperty("--colour", run.colour)
    recipes.append(label)
  })
  draw()
}

function traces() {
  const axis = form.axis.value
  const found = []
  const line = (x, y, name, colour, more) =>
    found.push({ x, y, name, mode: "lines", line: { color: colour, ...more.line }, ...more.trace })
  form.querySelectorAll("[name=recipe]:checked").forEach((box) => {
    const run = data.ours[box.value]
    const { x, mean, low, high, seeds } = run[axis]
    if (form.show.value === "band" && low) {
      const quiet = { showlegend: false, hoverinfo: "skip" }
      line(x, low, run.label, run.colour, { line: { width: 0 }, trace: quiet })
      line(x, high, run.label, run.colour, {
        line: { width: 0 }, trace: { ...quiet, fill: "tonexty", fillcolor: `${run.colour}33` } })
    } else if (seeds.length > 1) {
      seeds.forEach((y, i) => line(x, y, `${run.label}, seed ${run.numbers[i]}`, run.colour, {
        line: { width: 1 }, trace: { showlegend: false, opacity: 0.6 } }))
    }
    line(x, mean, run.label, run.colour, { line: { width: 2.5 }, trace: {} })
  })
  const end = Math.max(...data.ours.map((run) => run[axis].x.at(-1)))
  data.lines.forEach(({ label, mean }, i) =>
    line([0, end], [mean, mean], label, `hsl(${40 * i}, 15%, 55%)`, { line: { dash: "dash" }, trace: {} }))
  if (axis === "step") data.points.forEach(({ label, x, y }, i) =>
    line(x, y, label, ["#17becf", "#bcbd22"][i % 2], { line: { dash: "dash" }, trace: { mode: "lines+markers" } }))
  return found
}

function draw() {
  const style = getComputedStyle(document.body)
  const text = style.getPropertyValue("--md-default-fg-color")
  const grid = style.getPropertyValue("--md-default-fg-color--lightest")
  const axis = { gridcolor: grid, zerolinecolor: grid }
  const title = form.axis.value === "step" ? "environment steps (millions)" : "minutes of training"
  const narrow = window.innerWidth < 600
  Plotly.react("plot", traces(), {
    font: { color: text, family: "inherit" }, modebar: { bgcolor: "transparent", color: text },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    xaxis: { ...axis, title: { text: title }, rangemode: "tozero" },
    yaxis: { ...axis, title: { text: "return" }, automargin: true },
    margin: { l: narrow ? 40 : 60, r: 10, t: 30, b: 60 }, height: 560,
    legend: { orientation: "h", y: -0.18 }, hovermode: "closest",
  }, { responsive: true, displaylogo: false, showSendToCloud: false })
}

form.env.addEventListener("change", load)
form.addEventListener("change", (event) => event.target !== form.env && draw())
new MutationObserver(() => data && draw()).observe(document.body, { attributeFilter: ["data-md-color-scheme"] })
load()
