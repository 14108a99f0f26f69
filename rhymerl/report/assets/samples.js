"use strict";
// The index of answers, of which only the rows in view are in the page, and the text of the one that is chosen.
{
  const HEIGHT = 32;
  const NOT_DRAFTED = -2;
  const UNKNOWN = -1;
  const HISTORY = 4;
  const OLDEST = 6; // epochs, from which on colours are the same
  const $ = (id) => document.getElementById(id);

  const originName = (source) => {
    if (source === NOT_DRAFTED) return "sampled without a draft";
    if (source === UNKNOWN) return "unknown";
    if (source >= HISTORY) return source === HISTORY ? "history, newest epoch" : `history, ${source - HISTORY} older`;
    return ["own text", "sibling", "run-ahead", "another prompt's answer"][source];
  };

  const originColour = (source) => {
    if (source === NOT_DRAFTED) return "transparent";
    const name = source === UNKNOWN ? "unknown" : source >= HISTORY ? "history" : ["own", "sibling", "run_ahead", "other"][source];
    const share = source >= HISTORY ? 48 - 6 * Math.min(source - HISTORY, OLDEST) : 42;
    return `color-mix(in srgb, var(--source-${name}) ${share}%, transparent)`;
  };

  class Browser {
    constructor(samples) {
      this.samples = samples;
      this.columns = samples.columns;
      this.columns.rate = this.columns.tokens.map((tokens, row) => (this.columns.passes[row] ? tokens / this.columns.passes[row] : null));
      this.textOf = new Map(samples.text_rows.map((row, index) => [row, index]));
      this.titles = new Map();
      for (const [row, index] of this.textOf) {
        const prompt = this.columns.prompt[row];
        if (!this.titles.has(prompt)) this.titles.set(prompt, samples.texts[index].prompt.replace(/\s+/g, " ").trim());
      }
      this.haystack = samples.texts.map((each) => `${each.prompt}\n${each.text}`.toLowerCase());
      this.sorted = { column: "reward", descending: false };
      this.chosen = null;
    }

    title(row) {
      const prompt = this.columns.prompt[row];
      return this.titles.get(prompt) ?? this.samples.prompt_ids[prompt];
    }

    filter(words, withText) {
      const needle = words.toLowerCase().trim();
      const prompts = needle ? this.samples.prompt_ids.map((id) => id.toLowerCase().includes(needle)) : null;
      const fits = (row) => {
        const text = this.textOf.get(row);
        if (withText && text === undefined) return false;
        return !needle || prompts[this.columns.prompt[row]] || (text !== undefined && this.haystack[text].includes(needle));
      };
      const candidates = withText ? [...this.textOf.keys()] : this.columns.step.map((_, row) => row);
      this.rows = Uint32Array.from(candidates.filter(fits));
      this.sort();
    }

    sort() {
      const values = this.columns[this.sorted.column];
      const sign = this.sorted.descending ? -1 : 1;
      const { change, step } = this.columns;
      // What has no value comes last either way; of equal rewards those that fell most come first, then the newest.
      const compare = (one, other, sign) => (one === null || other === null ? (one === null) - (other === null) : sign * (one - other));
      const byChange = this.sorted.column === "reward" ? (a, b) => compare(change[a], change[b], 1) || step[b] - step[a] : () => 0;
      this.rows.sort((a, b) => compare(values[a], values[b], sign) || byChange(a, b) || a - b);
    }

    answersOf(prompt) {
      const found = new Map();
      this.columns.prompt.forEach((each, row) => {
        if (each !== prompt) return;
        const epoch = this.columns.epoch[row];
        if (!found.has(epoch)) found.set(epoch, []);
        found.get(epoch).push(row);
      });
      return [...found].sort((a, b) => a[0] - b[0]);
    }
  }

  rhymerl.parts.unshift((data) => {
    if (!data.samples.length) return;
    const browsers = data.samples.map(() => null);
    let browser;
    const number = (value, digits) => (value === null ? "" : value.toFixed(digits));
    const signed = (value) => (value === null ? "" : (value > 0 ? "+" : "") + value.toFixed(2));

    const rowOf = (place) => {
      const row = browser.rows[place];
      const { step, epoch, reward, change, tokens, rate } = browser.columns;
      const made = rhymerl.element("div", "row");
      made.setAttribute("role", "row");
      made.style.top = `${place * HEIGHT}px`;
      made.dataset.place = place;
      if (browser.textOf.has(row)) made.classList.add("has-text");
      if (row === browser.chosen) made.classList.add("is-chosen");
      const tone = change[row] > 0 ? "more" : change[row] < 0 ? "less" : "";
      const cells = [["", step[row]], ["", epoch[row]], ["prompt", browser.title(row)], ["", number(reward[row], 2)], [tone, signed(change[row])],
        ["", tokens[row] + (browser.columns.is_cut[row] ? "…" : "")], ["", number(rate[row], 1)]];
      for (const [name, text] of cells) made.append(rhymerl.element("span", name, String(text)));
      return made;
    };

    const showRows = () => {
      const rows = $("rows");
      const first = Math.max(0, Math.floor(rows.scrollTop / HEIGHT) - 5);
      const last = Math.min(browser.rows.length, Math.ceil((rows.scrollTop + rows.clientHeight) / HEIGHT) + 5);
      $("spacer").style.height = `${browser.rows.length * HEIGHT}px`;
      const made = [];
      for (let place = first; place < last; place++) made.push(rowOf(place));
      rows.replaceChildren($("spacer"), ...made);
    };

    const showAnswer = () => {
      const pane = $("answer");
      const index = browser.textOf.get(browser.chosen);
      if (index === undefined) {
        pane.replaceChildren(rhymerl.element("p", "note", "Choose a row with a text."));
        return;
      }
      const [text, row] = [browser.samples.texts[index], browser.chosen];
      const characters = Array.from(text.text); // runs and turns count characters, of which a string has two for some
      const { step, epoch, sample, reward, tokens, is_cut } = browser.columns;
      const parts = Object.entries(text.rewards).map(([name, value]) => `${name} ${number(value, 3)}`);
      const facts = [`step ${step[row]}`, `epoch ${epoch[row]}`, `sample ${sample[row]}`, `reward ${number(reward[row], 3)}`,
        ...(parts.length > 1 ? [`(${parts.join(", ")})`] : []), ...(text.advantage === null ? [] : [`advantage ${signed(text.advantage)}`]),
        `${tokens[row]} tokens${is_cut[row] ? ", cut off" : ""}`, ...(text.turns.length ? [`finish_reason ${text.finish_reason}`] : [])];
      pane.replaceChildren(
        rhymerl.element("h3", "", "Prompt"), rhymerl.element("pre", "", text.prompt),
        rhymerl.element("h3", "", "Answer"), ...(text.turns.length ? conversation(text, characters) : [coloured(text, characters)]), origins(text),
        rhymerl.element("p", "facts", facts.join(" · ")),
        rhymerl.element("h3", "", "This prompt by epoch: mean reward"), epochs(row),
      );
      pane.scrollTop = 0;
    };

    const coloured = (text, characters, from = 0, to = Infinity) => {
      const made = rhymerl.element("pre");
      const between = (start, stop) => characters.slice(Math.max(start, from), Math.min(stop, to)).join("");
      let start = 0;
      for (const [count, source] of text.runs ?? []) {
        const words = between(start, start + count);
        start += count;
        if (!words) continue;
        const part = rhymerl.element("span", source === NOT_DRAFTED ? "" : "origin", words);
        part.style.background = originColour(source);
        part.title = originName(source);
        made.append(part);
      }
      made.append(between(start, Infinity));
      return made;
    };

    const conversation = (text, characters) => {
      const made = [];
      let start = 0;
      text.turns.forEach((turn, index) => {
        const calls = turn.tools.length ? ` · calls ${turn.tools.join(", ")}` : "";
        made.push(rhymerl.element("h4", "", `Turn ${index + 1}${calls}`), coloured(text, characters, start, turn.start));
        start = turn.stop;
        if (turn.waited_s === null) return;
        const reward = turn.reward === null ? "" : ` · reward ${number(turn.reward, 3)}`;
        const reply = rhymerl.element("div", "reply");
        reply.append(rhymerl.element("h4", "", `${calls ? "Tools" : "Environment"} · ${number(turn.waited_s, 3)} s${reward}`));
        if (turn.stop > turn.start) reply.append(rhymerl.element("pre", "", characters.slice(turn.start, turn.stop).join("").trim()));
        made.push(reply);
      });
      return made;
    };

    const origins = (text) => {
      const made = rhymerl.element("div", "origins");
      if (text.runs === null) {
        made.textContent = "The engine did not tell which tokens came from drafts.";
        return made;
      }
      const counts = new Map();
      for (const [count, source] of text.runs) counts.set(source, (counts.get(source) ?? 0) + count);
      if (!counts.size || (counts.size === 1 && counts.has(NOT_DRAFTED))) made.textContent = "No token of it came from a draft.";
      else for (const source of [...counts.keys()].sort((a, b) => a - b).filter((each) => each !== NOT_DRAFTED)) {
        const key = rhymerl.element("span");
        const swatch = rhymerl.element("i");
        swatch.style.background = originColour(source);
        key.append(swatch, originName(source));
        made.append(key);
      }
      return made;
    };

    const epochs = (row) => {
      const made = rhymerl.element("div", "epochs");
      for (const [epoch, rows] of browser.answersOf(browser.columns.prompt[row])) {
        const rewards = rows.map((each) => browser.columns.reward[each]).filter((each) => each !== null);
        const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
        const button = rhymerl.element("button", "", `${epoch}: ${number(mean, 2)}`);
        const target = rows.find((each) => each !== row && browser.textOf.has(each) && browser.columns.sample[each] === browser.columns.sample[row]) ?? rows.find((each) => browser.textOf.has(each));
        button.disabled = target === undefined;
        button.setAttribute("aria-current", String(epoch === browser.columns.epoch[row]));
        button.addEventListener("click", () => choose(target));
        made.append(button);
      }
      return made;
    };

    const choose = (row) => {
      browser.chosen = row;
      showRows();
      showAnswer();
    };

    const refresh = () => {
      browser.filter($("search").value, $("with-text").checked);
      $("rows").scrollTop = 0;
      const all = browser.samples.num_answers;
      const listed = browser.columns.step.length;
      $("num-rows").textContent = `${browser.rows.length.toLocaleString("en")} of ${all.toLocaleString("en")} answers` +
        (listed < all ? `; ${listed.toLocaleString("en")} are listed` : "");
      for (const button of document.querySelectorAll(".head button")) {
        const isSorted = button.dataset.column === browser.sorted.column;
        if (isSorted) button.setAttribute("aria-sort", browser.sorted.descending ? "descending" : "ascending");
        else button.removeAttribute("aria-sort");
      }
      showRows();
    };

    const open = (index) => {
      browser = browsers[index] ??= new Browser(data.samples[index]);
      $("with-text").checked = $("with-text").checked && browser.textOf.size > 0;
      refresh();
      if (browser.chosen === null) browser.chosen = Array.from(browser.rows).find((row) => browser.textOf.has(row)) ?? null;
      choose(browser.chosen);
    };

    let isDue = false;
    $("rows").addEventListener("scroll", () => {
      if (!isDue) requestAnimationFrame(() => { isDue = false; showRows(); });
      isDue = true;
    });
    $("rows").addEventListener("click", (event) => {
      const made = event.target.closest(".row");
      if (made && made.classList.contains("has-text")) choose(browser.rows[Number(made.dataset.place)]);
    });
    $("rows").addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const place = Array.from(browser.rows).indexOf(browser.chosen) + move;
      if (place < 0 || place >= browser.rows.length) return;
      choose(browser.rows[place]);
      const rows = $("rows");
      rows.scrollTop = Math.min(Math.max(rows.scrollTop, (place + 1) * HEIGHT - rows.clientHeight), place * HEIGHT);
    });
    for (const button of document.querySelectorAll(".head button")) {
      button.addEventListener("click", () => {
        const column = button.dataset.column;
        browser.sorted = { column, descending: browser.sorted.column === column ? !browser.sorted.descending : true };
        refresh();
      });
    }
    $("search").addEventListener("input", refresh);
    $("with-text").addEventListener("change", refresh);
    $("sample-run").addEventListener("change", (event) => open(Number(event.target.value)));
    open(0);
  });
}
