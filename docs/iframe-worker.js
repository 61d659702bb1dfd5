// The search runs in a web worker, which browsers refuse to pages opened from a disk. There, a hidden frame runs it.
// Zensical would load the package iframe-worker from a server, unless a file of this name is in mkdocs.yml.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    window.addEventListener("message", (event) => {
      if (event.source !== inside) return;
      const told = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(told);
      this.onmessage?.(told);
    });
    inside.document.open();
    inside.document.write('<body><script>postMessage = (data) => parent.postMessage(data, "*")</script>');
    inside.document.write(`<script src="${url}"></script>`);
    inside.document.close();
    this.loaded = new Promise((resolve) => (inside.onload = resolve));
  }

  postMessage(data) {
    const told = new MessageEvent("message", { data: structuredClone(data) }); // the search changes what it gets
    this.loaded.then(() => this.frame.contentWindow.dispatchEvent(told));
  }

  terminate() {
    this.frame.remove();
  }
}
if (location.protocol === "file:") window.Worker = FrameWorker;
