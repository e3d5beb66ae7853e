// All that a page can try on a service at `target`, and what it gets to see of the answers.
async ([target, home, empty, tarball]) => {
  const seen = [];
  const wait = (ms) => new Promise((wake) => setTimeout(wake, ms));
  const read = async (path, options) => {
    try {
      const answer = await fetch(target + path, options);
      seen.push(`${path} ${answer.status} ${answer.type} ${(await answer.text()).slice(0, 20000)}`);
    } catch (problem) { seen.push(`${path} ${problem}`); }
  };
  const exported = JSON.stringify({ sandbox: `local:${home}` });
  const restored = JSON.stringify({ sandbox: `local:${empty}` });
  const bytes = Uint8Array.from(atob(tarball), (character) => character.charCodeAt(0));
  for (const path of ["/v1/memories", "/v1/memories/SECRET/snapshots", "/metrics", "/openapi.json", "/v1/attachments"]) {
    await read(path);
    await read(path, { mode: "no-cors" });
  }
  for (const mode of ["cors", "no-cors"]) {
    for (const kind of ["text/plain", "application/x-www-form-urlencoded", "application/json"]) {
      const options = { method: "POST", mode, headers: { "content-type": kind } };
      await read("/v1/memories/planted-1/exports", { ...options, body: exported });
      await read("/v1/memories/SECRET/restores", { ...options, body: restored });
      await read("/v1/memories/SECRET/forks", { ...options, body: '{"memory": "planted-2"}' });
    }
    await read("/v1/memories/planted-3/archives", { method: "POST", mode, body: new Blob([bytes]) });
    await read("/v1/memories/planted-4/exports", { method: "POST", mode, body: new Blob([exported]) });
    await read("/v1/memories/planted-5/archives", { method: "POST", mode, body: new Blob([bytes], { type: "text/plain" }) });
  }
  await read("/v1/memories/SECRET", { method: "DELETE" });
  const json = { "content-type": "application/json" };
  await read("/v1/memories/SECRET/head", { method: "PUT", headers: json, body: '{"snapshot": "latest"}' });
  navigator.sendBeacon(`${target}/v1/memories/planted-6/exports`, exported);
  navigator.sendBeacon(`${target}/v1/memories/planted-6/archives`, new Blob([bytes]));
  for (const enctype of ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"]) {
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.name = enctype;
    const form = document.body.appendChild(document.createElement("form"));
    Object.assign(form, { action: `${target}/v1/memories/planted-7/exports`, method: "POST", enctype, target: enctype });
    const field = form.appendChild(document.createElement("input"));
    Object.assign(field, { name: `{"sandbox": "local:${home}", "label": "`, value: '"}' });
    form.submit();
  }
  for (const tag of ["script", "img", "link"]) {
    const made = document.createElement(tag);
    made.onload = () => seen.push(`loaded ${tag}`);
    if (tag === "link") made.rel = "stylesheet";
    made[tag === "link" ? "href" : "src"] = `${target}/v1/memories`;
    document.body.append(made);
  }
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.src = `${target}/`;
  const stream = new EventSource(`${target}/v1/events`);
  stream.onopen = () => seen.push("loaded the stream of events");
  const socket = new WebSocket(target.replace("http", "ws") + "/v1/events");
  socket.onopen = () => seen.push("loaded a socket");
  await wait(1500);
  stream.close();
  let framed = "nothing";
  try { framed = frame.contentDocument.querySelector("#memories") ? "our page" : "nothing"; } catch { /* not ours to see */ }
  seen.push(`framed ${framed}`);
  return seen;
}
