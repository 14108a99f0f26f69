"use strict";
// Unpacks what the page carries, then starts its parts. Text of models gets into the page as textContent only.
const rhymerl = { parts: [] };

rhymerl.unpack = async (id) => {
  const raw = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index++) bytes[index] = raw.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

rhymerl.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

rhymerl.element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

rhymerl.loadLibrary = async () => {
  const script = document.createElement("script");
  script.textContent = await rhymerl.unpack("library");
  document.head.append(script);
};

window.addEventListener("load", async () => {
  try {
    rhymerl.data = JSON.parse(await rhymerl.unpack("data"));
    for (const start of rhymerl.parts) await start(rhymerl.data);
    document.body.dataset.ready = "yes";
  } catch (error) {
    const problem = document.getElementById("problem");
    problem.textContent = `Charts and samples cannot be shown: ${error.message}`;
    problem.hidden = false;
    document.body.dataset.ready = "failed";
    throw error;
  }
});
